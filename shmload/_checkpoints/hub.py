"""Find a source on the local disk: a path as it is, a hub id in huggingface's cache.

The network is asked only for what the cache lacks.
"""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shmload._checkpoints.hub_download import download
from shmload._checkpoints.hub_files import bring_file, hub_file_of
from shmload._checkpoints.mirror import mirror
from shmload._checkpoints.paths import not_found
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.repository import are_in_format
from shmload._checkpoints.resolve import Source, resolve, resolve_model
from shmload._checkpoints.wanted import Hub, Wanted
from shmload._wording import nearest
from shmload.errors import ArgumentError, IndexMalformed, ShardMissing, ShmloadError, SourceNotFound

# huggingface_hub.utils.validate_repo_id, without its details.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find_source(wanted: Wanted, kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find a source on the local disk, or bring it there.

    Args:
        wanted: what to find; its dtype is not used.
        kwargs: other arguments of `from_pretrained`. Components among them are not looked for.

    Raises:
        SourceNotFound: there is no such path or hub id.
        CheckpointError: an index is wrong, or a shard is missing.
    """
    given, hub = wanted.source, wanted.hub
    if isinstance(wanted.components, str):
        raise ArgumentError(f"components is {wanted.components!r}; give a list of names")

    def resolve_in(root: Path) -> Source:
        below = root / hub.subfolder if hub.subfolder else root
        if hub.subfolder and root.is_dir() and not below.is_dir():
            folders = [name for name in _names_in(root) if (root / name).is_dir()]
            near = nearest(hub.subfolder, folders)
            raise SourceNotFound(given, f"it has no subfolder {hub.subfolder!r}{near}")
        if hub.subfolder and root.is_file():
            raise ArgumentError(f"subfolder is for directories, and {given} is a file")
        return resolve(
            given,
            below,
            variant=wanted.variant,
            components=wanted.components,
            passed=kwargs or (),
            weight_names=hub.weight_names,
            use_safetensors=(kwargs or {}).get("use_safetensors"),
        )

    is_model = bool(hub.subfolder or hub.weight_names)
    return _find(wanted, resolve_in, kwargs or {}, is_model=is_model)


def find_model(wanted: Wanted, kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find one model on the local disk, or bring it there.

    Args:
        wanted: the model's repository or directory, its subfolder and variant; its dtype is not
            used.
        kwargs: other arguments of `from_pretrained`.

    Returns:
        The repository or directory, as `resolve_model` describes it.

    Raises:
        SourceNotFound: there is no such path or hub id.
        CheckpointError: an index is wrong, or a shard is missing.
    """
    given = os.fspath(wanted.source)

    def resolve_in(root: Path) -> Source:
        return resolve_model(
            given,
            root,
            subfolder=wanted.hub.subfolder,
            variant=wanted.variant,
            use_safetensors=(kwargs or {}).get("use_safetensors"),
        )

    return _find(wanted, resolve_in, kwargs or {}, is_model=True)


def _find(
    wanted: Wanted,
    resolve_in: Callable[[Path], Source],
    kwargs: Mapping[str, Any],
    *,
    is_model: bool,
) -> Source:
    """Find a source, and its files by a function that gets its directory."""
    given = wanted.source
    if is_url(given):
        on_hub = hub_file_of(str(given))
        return resolve_in(bring_file(on_hub, wanted.hub) if on_hub else mirror(wanted))
    try:
        if Path(given).exists():
            return resolve_in(Path(given))
    except ShmloadError:
        raise
    except OSError as exc:  # a name too long, a directory that may not be entered
        raise SourceNotFound(given, exc.strerror or str(exc)) from exc
    if not _HUB_ID.fullmatch(str(given)):
        raise not_found(given, "no such file or directory")
    if _is_offline(wanted.hub):
        return _find_cached(wanted, resolve_in)
    if not wanted.hub.force_download:
        # Download what the cache lacks, or has only in part.
        with contextlib.suppress(ShardMissing, IndexMalformed, SourceNotFound):
            found = _find_cached(wanted, resolve_in)
            use_safetensors = kwargs.get("use_safetensors")
            if found.is_complete and are_in_format(
                _folders(found, wanted, kwargs), use_safetensors
            ):
                return found
    return resolve_in(download(wanted, kwargs, is_model=is_model))


def _folders(found: Source, wanted: Wanted, kwargs: Mapping[str, Any]) -> list[Path]:
    """Return the folders of the models that are wanted of a source."""
    if found.is_pipeline:
        chosen = found.components if wanted.components is None else wanted.components
        return [found.root / name for name in chosen if name not in kwargs]
    return [checkpoint.folder for checkpoint in found.checkpoints] or [
        found.root / (wanted.hub.subfolder or "")
    ]


def _find_cached(wanted: Wanted, resolve_in: Callable[[Path], Source]) -> Source:
    root = find_cached(str(wanted.source), wanted.hub)
    if root is None:
        cause = "local_files_only" if wanted.hub.local_files_only else "HF_HUB_OFFLINE"
        there, near = _what_is_cached(str(wanted.source), wanted.hub)
        reason = f"not in the hub cache{there}, and downloads are off ({cause}){near}"
        with contextlib.suppress(FileNotFoundError):  # this process's directory may be gone
            reason = f"no such file or directory in {os.getcwd()}; as a hub id it is {reason}"
        raise not_found(wanted.source, reason)
    return resolve_in(root)


def _what_is_cached(repo_id: str, hub: Hub) -> tuple[str, str]:
    """Return what to say of the hub cache, and of a hub id in it that may have been meant."""
    from huggingface_hub import constants

    cache = Path(hub.cache_dir or constants.HF_HUB_CACHE)
    names = {name.removeprefix("models--").replace("--", "/"): name for name in _names_in(cache)}
    if repo_id not in names:
        return f" ({cache})", nearest(repo_id, [name for name in names if "/" in name])
    if hub.revision is None:
        return " in full", ""
    there = _revisions_in(cache / names[repo_id])
    listed = ", ".join(there) or "none"
    return f" in revision {hub.revision!r} (there: {listed})", nearest(hub.revision, there)


def _revisions_in(repository: Path) -> list[str]:
    """Return the revisions of a cached repository, in full: the cache knows no short commits."""
    commits, refs = _names_in(repository / "snapshots"), repository / "refs"
    found = []
    for path in sorted(path for path in refs.rglob("*") if path.is_file()):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text().strip() in commits:
                found.append(str(path.relative_to(refs)))  # such as `refs/pr/7`
    return found + commits


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def find_cached(repo_id: str, hub: Hub) -> Path | None:
    """Return the directory of a hub id in the hub cache; None if it is not there.

    Raises:
        SourceNotFound: it is not a hub id.
    """
    from huggingface_hub import try_to_load_from_cache

    for name in ("model_index.json", "config.json"):
        try:
            found = try_to_load_from_cache(
                repo_id, name, cache_dir=hub.cache_dir, revision=hub.revision
            )
        except ValueError as exc:  # such as `a--b`, which is not a valid hub id
            raise SourceNotFound(
                repo_id, f"no such file or directory, nor a hub id: {exc}"
            ) from exc
        if isinstance(found, str):
            return Path(found).parent
    return _cached_snapshot(repo_id, hub)


def _cached_snapshot(repo_id: str, hub: Hub) -> Path | None:
    """Return the directory of a cached repository whose root has no model, only its folders."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            repo_id, cache_dir=hub.cache_dir, revision=hub.revision, local_files_only=True
        )
    except OSError:  # LocalEntryNotFoundError is one
        return None
    return Path(found)


def _is_offline(hub: Hub) -> bool:
    from huggingface_hub import constants

    return bool(hub.local_files_only or constants.HF_HUB_OFFLINE)
