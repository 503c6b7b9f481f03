"""View directories: they look like a source, and stay; their weights are links to segments."""

import contextlib
import os
import secrets
import time
from collections.abc import Collection
from typing import Any

import msgspec

from shmload._checkpoints.left_out import find_left_out
from shmload._checkpoints.source import Source
from shmload._checkpoints.wanted import Hub, Wanted, require_bools
from shmload._host.shm import SHM_DIR
from shmload._loading.load import Load
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import How, complete_load, find_with_rules, require_read
from shmload._loading.view_layout import ViewLayout, lay_out_view
from shmload._segments.segment import Stay
from shmload._segments.standing_views import (
    ViewDirectory,
    describe_view,
    find_standing,
    known_view,
    protect,
    release,
    settle,
)
from shmload._segments.view_folder import (
    is_intact,
    put_in_place,
    read_marker,
    stage,
    staging_for,
)
from shmload._segments.view_register import (
    ViewArguments,
    ViewEntry,
    ViewRecord,
    changing_view,
    read_entry,
)
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import ArgumentError, ViewRefused

logger = logger_of(__name__)


def view_directory(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    replace: bool = False,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **hub_kwargs: Any,
) -> ViewDirectory:
    """Make a directory that looks like the source, whose weights lie decoded in shared memory.

    It stays, for programs that know nothing of shmload and take a path. Its weights are links to
    resident segments, which are pinned as long as the directory is there. Small files are copied,
    the others linked. The user's state directory records it: `restore_view_directory` decodes the
    weights again after a restart.

    A second call with the same arguments changes nothing, unless the source has changed: the
    directory is then built anew beside the old one, which it replaces in one step.

    Args:
        source: as for `warm`.
        directory: where to make it; what is there must be a view directory of the same arguments.
            Directories above it are made.
        dtype: as for `view`.
        components: as for `warm`.
        variant: as for `warm`.
        replace: put it in the place of a view directory of other arguments.
        workers: as for `warm`.
        verify: as for `warm`.
        progress: as for `load_state_dict`.
        hub_kwargs: as for `warm`.

    Returns:
        What was made, or was there.

    Raises:
        ArgumentError: the directory lies in the source, or the source in it or in another view
            directory.
        ViewRefused: there is something else at its place.
        ViewBusy: another process makes or removes it, for longer than `SHMLOAD_WAIT_TIMEOUT_S`.
        ViewUnwritable: it, or the record of it, cannot be written.
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError, CapacityError, WorkerError,
        SegmentError: as `warm`; at the place is what was there before.
    """
    require_bools(replace=replace, verify=verify)
    wanted = Wanted.parse(source, dtype, components, variant, hub_kwargs, function=view_directory)
    place = _place_of(directory)
    arguments = _arguments(wanted)
    with changing_view(place, settings().wait_timeout_s):
        entry = find_standing(place)
        here = read_marker(place)
        if not here and os.path.lexists(place):
            raise ViewRefused(place, "it is there, and no view directory; choose another place")
        # Of a directory that was deleted the register still says what it was.
        if not replace and here:
            _require_same(entry, arguments)
        with Progress(progress, wanted.title) as counter, contextlib.ExitStack() as ending:
            found, rules = find_with_rules(wanted, counter.steps, may_be_unread=True)
            require_read(found, wanted)
            _require_apart(found, place)
            ending.callback(settle, place)  # last: also if the load fails
            how = How(stay=Stay.RESIDENT, workers=workers, verify=verify)
            load = ending.enter_context(complete_load(found, rules, how, counter))
            names = {plan.path: plan.segment for plan in load.holdings.plans}
            layout = lay_out_view(found, names, rules)
            _stand(entry, arguments, layout, load)
        if here and here.directory != place:
            _forget_moved(here.directory, place)
        for each in find_left_out(found, wanted.variant):
            logger.info("%s: linked as it is: %s", wanted.source, each)
        return describe_view(read_entry(place))


def restore_view_directory(
    directory: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Callback | bool | None = None,
) -> ViewDirectory:
    """Decode the weights of a view directory again after a restart, as `view_directory` has done.

    It also follows a changed source, and makes the directory again if it is gone.

    Args:
        directory: of the view.
        workers: as for `warm`.
        progress: as for `load_state_dict`.

    Raises:
        ViewNotFound: there is no such view directory.
        As `view_directory`.
    """
    place = _place_of(directory)
    entry = known_view(place)
    record = entry.standing or entry.pending
    assert record is not None
    given = msgspec.structs.asdict(record.arguments)
    names = given.pop("weight_name")
    return view_directory(
        given.pop("source"),
        place,
        workers=workers,
        progress=progress,
        weight_name=list(names) or None,
        **given,
    )


def _stand(entry: ViewEntry, arguments: ViewArguments, layout: ViewLayout, load: Load) -> None:
    """Make the directory, unless it is there as it should be; pin its segments in any case."""
    held = load.holdings.segments()
    stamps = {path: copied.stamp for path, copied in layout.copies.items()}
    standing = entry.standing
    if (
        standing
        and (standing.arguments, standing.links, standing.copies)
        == (arguments, layout.links, stamps)
        and is_intact(standing)
    ):
        protect(entry, held)  # again: a restart has emptied /dev/shm
        return
    record = ViewRecord(
        directory=entry.directory,
        arguments=arguments,
        build=secrets.token_hex(8),
        made_at=time.time(),
        segments=tuple(sorted(segment.name for segment in held)),
        nbytes=sum(segment.nbytes for segment in held),
        links=layout.links,
        copies=stamps,
    )
    staging = staging_for(entry.directory)
    protect(msgspec.structs.replace(entry, pending=record, staging=staging), held)
    stage(staging, record, layout.copies)
    put_in_place(staging, entry.directory)


def _forget_moved(old: str, new: str) -> None:
    """Forget the place that a directory was moved from; if it was copied, both are kept."""
    with changing_view(old, settings().wait_timeout_s):
        entry = settle(old)
        if entry.standing and not read_marker(old):
            logger.warning("%s was moved to %s", old, new)
            release(entry, ViewEntry(directory=old))


def _require_same(entry: ViewEntry, arguments: ViewArguments) -> None:
    """Refuse another view at the place of one.

    Raises:
        ViewRefused: the arguments differ.
    """
    if not entry.standing or entry.standing.arguments == arguments:
        return
    before = msgspec.to_builtins(entry.standing.arguments)
    now = msgspec.to_builtins(arguments)
    differing = ", ".join(
        f"{name} {before.get(name)!r} instead of {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    )
    raise ViewRefused(
        entry.directory,
        f"it is a view directory of {differing}; to replace it, `shmload view --replace`",
    )


def _require_apart(found: Source, place: str) -> None:
    """Refuse a directory in its source, or a source that is a view directory.

    Raises:
        ArgumentError: it is one.
    """
    root = os.path.realpath(found.root)
    if _is_in(place, root) or _is_in(root, place):
        raise ArgumentError(f"{place} and its source {root} lie in one another; choose another")
    segments = f"{SHM_DIR}{os.sep}shmload-"
    if any(os.path.realpath(shard).startswith(segments) for shard in found.shards):
        raise ArgumentError(f"{found.given} is a view directory itself; give what it was made of")


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _place_of(directory: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory, without links.

    Raises:
        ArgumentError: no file can have this name, or a register cannot name it.
    """
    given = os.fspath(directory)
    if not isinstance(given, str) or not given:
        raise ArgumentError(f"directory is {directory!r}; give a path")
    try:
        place = os.path.realpath(os.path.expanduser(given))
        os.fsencode(place).decode("utf-8")
    except ValueError as exc:  # a zero byte, or bytes that are not UTF-8
        raise ArgumentError(f"directory is {given!r}; give a path in UTF-8") from exc
    return place


def _arguments(wanted: Wanted) -> ViewArguments:
    """Return what a view is made of in a form that can be compared and written."""
    settled: Any = wanted.settled()
    hub: Hub = settled.hub
    return ViewArguments(
        source=settled.source,
        dtype=settled.dtype,
        components=settled.components,
        variant=settled.variant,
        subfolder=hub.subfolder,
        weight_name=tuple(sorted(hub.weight_names)),
        revision=hub.revision,
        cache_dir=None if hub.cache_dir is None else str(hub.cache_dir),
    )
