"""From what a user names to a local path: a path as it is, a hub id through huggingface's cache.

Offline first: what the cache has is used without asking the network.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from shmload._checkpoints.resolve import Source, resolve
from shmload.errors import ArgumentError, IndexMalformed, ShardMissing, ShmloadError, SourceNotFound

# huggingface_hub.utils.validate_repo_id, without its details.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find_source(
    given: str | os.PathLike[str],
    *,
    variant: str | None = None,
    components: Collection[str] | None = None,
    passed: Collection[str] = (),
    subfolder: str | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Source:
    """Find a source on the local disk, or bring it there.

    Args:
        given: a path, or the id of a model on the hub.
        variant: as for `resolve`.
        components: as for `resolve`.
        passed: as for `resolve`.
        subfolder: one component's directory in the source.
        revision: branch, tag or commit of a hub id.
        cache_dir: the hub cache, if not the default.
        token: for the hub.
        local_files_only: never download.
        force_download: download a hub id even if it is cached.

    Raises:
        SourceNotFound: it is nowhere.
        CheckpointError: an index is wrong, or a shard is missing.
    """
    if isinstance(components, str):
        raise ArgumentError(f"components is {components!r}; give a list of names")

    def resolve_in(root: Path) -> Source:
        below = root / subfolder if subfolder else root
        return resolve(given, below, variant=variant, components=components, passed=passed)

    try:
        if Path(given).exists():
            return resolve_in(Path(given))
    except ShmloadError:
        raise
    except OSError as exc:  # a name too long, a directory that may not be entered
        raise SourceNotFound(given, exc.strerror or str(exc)) from exc
    if not _HUB_ID.fullmatch(str(given)):
        raise SourceNotFound(given, "no such file or directory")
    hub_kwargs = {
        "revision": revision,
        "cache_dir": cache_dir,
        "token": token,
        "local_files_only": local_files_only,
    }
    return _find_in_hub(given, resolve_in, variant, hub_kwargs, force_download=force_download)


def _find_in_hub(
    given: str | os.PathLike[str],
    resolve_in: Callable[[Path], Source],
    variant: str | None,
    hub_kwargs: dict[str, Any],
    *,
    force_download: bool,
) -> Source:
    if _is_offline(hub_kwargs):
        return _find_cached(given, resolve_in, hub_kwargs)
    if not force_download:
        # What the cache has not, or not whole, is downloaded.
        with contextlib.suppress(ShardMissing, IndexMalformed, SourceNotFound):
            found = _find_cached(given, resolve_in, hub_kwargs)
            if found.is_complete:
                return found
    hub_kwargs = hub_kwargs | {"force_download": force_download}
    return resolve_in(_download(str(given), variant, hub_kwargs))


def _find_cached(
    given: str | os.PathLike[str],
    resolve_in: Callable[[Path], Source],
    hub_kwargs: dict[str, Any],
) -> Source:
    root = _cached_root(str(given), hub_kwargs)
    if root is None:
        raise SourceNotFound(given, "not in the hub cache, and downloads are off (HF_HUB_OFFLINE)")
    return resolve_in(root)


def _cached_root(repo_id: str, hub_kwargs: dict[str, Any]) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for name in ("model_index.json", "config.json"):
        try:
            found = try_to_load_from_cache(
                repo_id,
                name,
                cache_dir=hub_kwargs.get("cache_dir"),
                revision=hub_kwargs.get("revision"),
            )
        except ValueError as exc:  # such as `a--b`, of which the hub has none
            raise SourceNotFound(
                repo_id, f"no such file or directory, nor a hub id: {exc}"
            ) from exc
        if isinstance(found, str):
            return Path(found).parent
    return None


def _is_offline(hub_kwargs: dict[str, Any]) -> bool:
    from huggingface_hub import constants

    return bool(hub_kwargs.get("local_files_only") or constants.HF_HUB_OFFLINE)


def _download(repo_id: str, variant: str | None, hub_kwargs: dict[str, Any]) -> Path:
    # The library knows which of a repository's files a pipeline needs. By name: the core imports no
    # model library.
    module = importlib.import_module("shmload.integrations.diffusers")
    try:
        return Path(module.download(repo_id, variant=variant, **hub_kwargs))
    except Exception as exc:  # of the hub's HTTP client too, which changes with its version
        reason = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise SourceNotFound(
            repo_id, f"no such file or directory, and it cannot be downloaded: {reason}"
        ) from exc
