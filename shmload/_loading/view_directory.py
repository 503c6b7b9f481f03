"""View directories: they look like a source, and stay; their weights are links to pinned segments.

Guarantee: no file that shmload did not make is replaced or removed, and nothing is written through
a link. A call that was killed leaves a directory that the same call completes.
"""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.indexes import read_json
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Source
from shmload._checkpoints.wanted import Wanted, require_bools
from shmload._host.shm import SHM_DIR
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import complete_load, find_with_rules, require_read
from shmload._segments.names import name_prefix
from shmload._segments.segment import Stay
from shmload._segments.upkeep import move_pins
from shmload._segments.view import Entries, absolute, entries_like
from shmload.errors import ArgumentError, ViewRefused

MARKER = ".shmload-view"
"""The file that marks a view directory; it names the files there that are not links."""
# What transformers calls the dtype of a model in its configuration, now and before.
_DTYPE_KEYS = ("dtype", "torch_dtype")
_CONFIG = "config.json"


def view_directory(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **hub_kwargs: Any,
) -> Path:
    """Make a directory that looks like the source, whose weights lie decoded in shared memory.

    It stays, for programs that know nothing of shmload and take a path. Its weights are links to
    resident segments, which are pinned; everything else is a link to the original, but for
    configurations that name another dtype than the segments have. A second call makes the links
    anew: after a restart, for a source that has changed, or with other arguments.

    To end it, remove the directory and `unpin` or `evict` the source.

    Args:
        source: as for `warm`.
        directory: where to make it: a new or empty directory, or a view directory. Directories
            above it are made.
        dtype: as for `view`.
        components: as for `warm`.
        variant: as for `warm`.
        workers: as for `warm`.
        verify: as for `warm`.
        progress: as for `load_state_dict`.
        hub_kwargs: as for `warm`.

    Returns:
        The directory, absolute.

    Raises:
        ArgumentError: the directory lies in the source, or the source in it or in another view
            directory.
        ViewRefused: the directory has files, and is no view directory; or one of its files is in
            the way; or it cannot be written.
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError, CapacityError, WorkerError,
        SegmentError: as `warm`.
    """
    require_bools(verify=verify)
    wanted = Wanted.parse(source, dtype, components, variant, hub_kwargs, function=view_directory)
    place = absolute(Path(directory).expanduser())
    is_marked = (place / MARKER).exists()
    if os.path.lexists(place) and not (is_marked or (place.is_dir() and not os.listdir(place))):
        raise ViewRefused(
            f"{place} is there, and no view directory; choose another place", path=place
        )
    with Progress(progress, wanted.title) as counter:
        found, rules = find_with_rules(wanted, counter, may_be_unread=True)
        require_read(found, wanted)
        _require_apart(found, place)
        with complete_load(found, rules, counter, Stay.RESIDENT, workers, verify) as load:
            held = load.holdings.segments()
            move_pins(held)
            for segment in held:
                segment.pin()
            names = {shard.path: SHM_DIR / shard.name for shard in load.holdings.shards}
            shown = entries_like(absolute(found.root), names)
            shown.files.update(_configurations(found, shown, rules))
            try:
                _fill(place, shown)
            except ViewRefused:
                raise
            except OSError as exc:
                why = exc.strerror or str(exc)
                raise ViewRefused(f"{place} cannot be written: {why}", path=place) from exc
    return place


def _require_apart(found: Source, place: Path) -> None:
    """Refuse a directory in its source, and a source that is a view directory.

    Raises:
        ArgumentError: it is one.
    """
    root, inner = Path(os.path.realpath(found.root)), Path(os.path.realpath(place))
    if inner.is_relative_to(root) or root.is_relative_to(inner):
        raise ArgumentError(f"{place} and its source {root} lie in one another; choose another")
    if any(_leads_to_segment(shard) for shard in found.shards):
        raise ArgumentError(f"{found.given} is a view directory itself; give what it was made of")


def _leads_to_segment(path: Path) -> bool:
    return path.is_symlink() and os.readlink(path).startswith(f"{SHM_DIR}/{name_prefix()}")


def _configurations(found: Source, shown: Entries, rules: Mapping[str, Rule]) -> dict[str, bytes]:
    """Return the configurations that name another dtype than the segments have, by their place.

    A library that follows such a configuration would cast the weights, and so copy them.
    """
    changed, root = {}, absolute(found.root)
    for checkpoint in found.checkpoints:
        rule = rules[checkpoint.component]
        place = os.path.normpath(os.path.join(os.path.relpath(checkpoint.folder, root), _CONFIG))
        if rule.target and not rule.is_widening and place in shown.links:
            stored = read_json(shown.links[place])
            config = _with_dtype(stored, TORCH_NAMES[rule.target])
            if config != stored:
                del shown.links[place]
                changed[place] = json.dumps(config, indent=2).encode()
    return changed


def _with_dtype(config: Any, dtype: str) -> Any:
    """Return a configuration with another dtype, also in those in it."""
    if not isinstance(config, dict):
        return config
    names = TORCH_NAMES.values()
    return {
        key: dtype if key in _DTYPE_KEYS and value in names else _with_dtype(value, dtype)
        for key, value in config.items()
    }


def _fill(place: Path, shown: Entries) -> None:
    """Make a directory's links and files; each replaces an earlier one in one step.

    Raises:
        ViewRefused: a file that shmload did not make is in the way.
        OSError: the directory cannot be written.
    """
    place.mkdir(parents=True, exist_ok=True)
    marker = place / MARKER
    marker.touch()
    written = set(os.fsdecode(marker.read_bytes()).split("\0"))
    going = _going(place, shown, written)
    # The marker comes first, and is replaced as they are: whole, or not at all.
    files = {MARKER: os.fsencode("\0".join(sorted(written | shown.files.keys()))), **shown.files}
    for path in going:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in shown.folders:
        (place / name).mkdir(exist_ok=True)
    new = place / f"{MARKER}-new"
    for name in (*files, *shown.links):
        new.unlink(missing_ok=True)
        if name in files:
            new.write_bytes(files[name])
        else:
            new.symlink_to(shown.links[name])
        new.replace(place / name)


def _going(place: Path, shown: Entries, written: Collection[str]) -> list[Path]:
    """Return what is to go before a directory is filled, each folder after what is in it.

    That is weights that the source has no more, links where folders are to be, and folders where
    links are to be.

    Raises:
        ViewRefused: a file that shmload did not make is in the way.
    """
    going, made = [], shown.links.keys() | shown.files.keys()
    for path in sorted(place.rglob("*"), reverse=True):  # it enters no link
        name, *above = map(str, (path.relative_to(place), *path.relative_to(place).parents))
        is_link = path.is_symlink()
        is_folder = path.is_dir() and not is_link
        is_in_the_way = name in (made if is_folder else shown.folders) or made.intersection(above)
        if is_link or is_folder or name in written:
            if is_in_the_way or (name not in made and _leads_to_segment(path)):
                going.append(path)
        elif is_in_the_way or name in made:
            raise ViewRefused(f"{path} is no file of the view directory; move it away", path=path)
    return going
