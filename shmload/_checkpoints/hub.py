"""Finds a source on the local disk: a path as it is, a hub id or URL in huggingface's cache.

The network is asked only for what the cache lacks. It comes by the libraries' own downloads: the
bytes come, and the cache is filled, as without shmload; with the user's token, and under the sha256
by which the segments of a hub model are named.
"""

import contextlib
import glob
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from shmload._checkpoints.library import library
from shmload._checkpoints.mirror import mirror
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.resolve import resolve, resolve_model
from shmload._checkpoints.source import INDEX, MODULAR_INDEX, Source
from shmload._checkpoints.wanted import Hub, Wanted
from shmload._checkpoints.weights import files_of_model
from shmload._host.collector import resumed_gc
from shmload.errors import ArgumentError, IndexMalformed, ShardMissing, ShmloadError, SourceNotFound

# huggingface_hub.utils.validate_repo_id, without its details.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# The hub's hosts in URLs of files, and what stands before a revision in one.
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OF_FILES = ("blob", "resolve", "raw")
# Letters of an error that is repeated.
_MOST_SAID = 500


def find_source(wanted: Wanted, kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find a source on the local disk, or bring it there.

    Args:
        wanted: what to find; its dtype is not used.
        kwargs: other arguments of `from_pretrained`. Components among them are not looked for.

    Raises:
        SourceNotFound: there is no such path or hub id.
        CheckpointError: an index is wrong, or a shard is missing.
    """
    if isinstance(wanted.components, str):
        raise ArgumentError(f"components is {wanted.components!r}; give a list of names")
    is_model = bool(wanted.hub.subfolder or wanted.hub.weight_names)
    return _find(wanted, resolve, kwargs or {}, is_model=is_model)


def find_model(wanted: Wanted, kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find one model on the local disk, or bring it there; arguments and errors as `find_source`.

    Returns:
        The repository or directory, as `resolve_model` describes it.
    """
    return _find(wanted, resolve_model, kwargs or {}, is_model=True)


def _find(
    wanted: Wanted,
    resolve_in: Callable[[Wanted, Path, Mapping[str, Any]], Source],
    kwargs: Mapping[str, Any],
    *,
    is_model: bool,
) -> Source:
    given, hub = wanted.source, wanted.hub
    if is_url(given):
        return resolve_in(wanted, bring_file(str(given), hub) or mirror(wanted), kwargs)
    try:
        if Path(given).exists():
            return resolve_in(wanted, Path(given), kwargs)
    except ShmloadError:
        raise
    except OSError as exc:  # a name too long, a directory that may not be entered
        raise SourceNotFound(f"{given}: {exc.strerror or str(exc)}") from exc
    if not _HUB_ID.fullmatch(str(given)):
        raise SourceNotFound(f"{given}: no such file or directory")
    from huggingface_hub import constants  # not for what is on the disk

    is_offline = hub.local_files_only or constants.HF_HUB_OFFLINE
    if is_offline or not hub.force_download:
        try:
            found = resolve_in(wanted, _require_cached(wanted), kwargs)
        except (ShardMissing, IndexMalformed, SourceNotFound):
            if is_offline:
                raise
        else:
            if is_offline or found.is_complete:
                return found
    # What the cache lacks, or has only in part.
    return resolve_in(wanted, _download(wanted, kwargs, is_model=is_model), kwargs)


def _require_cached(wanted: Wanted) -> Path:
    """Return the directory of a hub id in the hub cache.

    Raises:
        SourceNotFound: it is not there.
    """
    if found := find_cached(str(wanted.source), wanted.hub):
        return found
    cause = "local_files_only" if wanted.hub.local_files_only else "HF_HUB_OFFLINE"
    revision = f" in revision {wanted.hub.revision!r}" if wanted.hub.revision else ""
    reason = f"not in the hub cache in full{revision}, and downloads are off ({cause})"
    raise SourceNotFound(f"{wanted.source}: no such file or directory, and {reason}")


def find_cached(repo_id: str, hub: Hub) -> Path | None:
    """Return the directory of a hub id in the hub cache; None if it is not there.

    Raises:
        SourceNotFound: it is not a hub id.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    where: dict[str, Any] = {"cache_dir": hub.cache_dir, "revision": hub.revision}
    for name in (INDEX, MODULAR_INDEX, "config.json"):
        try:
            found = try_to_load_from_cache(repo_id, name, **where)
        except ValueError as exc:  # such as `a--b`, which is not a valid hub id
            raise SourceNotFound(
                f"{repo_id}: no such file or directory, nor a hub id: {exc}"
            ) from exc
        if isinstance(found, str):
            return Path(found).parent
    with contextlib.suppress(OSError):  # LocalEntryNotFoundError is one
        # Its root may have no model, only its folders.
        return Path(snapshot_download(repo_id, local_files_only=True, **where))
    return None


# Downloads ----------------------------------------------------------------------------------------


def _download(wanted: Wanted, kwargs: Mapping[str, Any], *, is_model: bool) -> Path:
    """Bring into the cache what a load needs, and return the repository's directory.

    Args:
        wanted: what to bring.
        kwargs: other arguments of `from_pretrained`.
        is_model: one model is wanted and not a whole pipeline.

    Raises:
        SourceNotFound: there is no such hub id, or it cannot be downloaded.
    """
    from huggingface_hub import model_info, snapshot_download

    repo_id = str(wanted.source)
    where = wanted.hub.where
    try:
        info = model_info(repo_id, revision=where["revision"], token=where["token"])
        names = {each.rfilename for each in info.siblings or ()}
        if INDEX in names and not is_model:
            # diffusers knows which of a repository's files a pipeline needs.
            given = {name: value for name, value in kwargs.items() if name != "subfolder"}
            given |= {**where, "variant": wanted.variant}
            download = library("makers").download
            with resumed_gc():
                return Path(download(repo_id, **given))
        files = files_of_model(names, wanted, kwargs)
        patterns = [glob.escape(each) for each in files]
        with resumed_gc():
            return Path(snapshot_download(repo_id, allow_patterns=patterns, **where))
    except Exception as exc:  # of the hub's HTTP client too, which changes with its version
        reason = f"no such file or directory, and it cannot be downloaded: {_in_a_line(exc)}"
        raise SourceNotFound(f"{repo_id}: {reason}") from exc


def _in_a_line(exc: Exception) -> str:
    """Return what the hub's library says, whose first line may be `404 Client Error` alone."""
    return " ".join(str(exc).split())[:_MOST_SAID] or type(exc).__name__


class HubFile(msgspec.Struct, frozen=True):
    """Where a file is on the hub."""

    repo_id: str
    name: str
    revision: str | None


def hub_file_of(url: str) -> HubFile | None:
    """Return the file of the hub that a URL means; None if it is a URL of another server.

    Known are the forms that diffusers' `from_single_file` reads, and those that the hub shows:
    `HOST/OWNER/REPO/blob/REVISION/NAME` (or `resolve`, `raw`), and `HOST/OWNER/REPO/NAME`.

    Raises:
        ArgumentError: it names a repository and no file.
    """
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise ArgumentError(f"{url} is no URL: {exc}") from exc
    own = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    if parts.scheme not in ("http", "https") or parts.netloc not in {*_HOSTS, own} - {""}:
        return None
    owner, repo, *rest = [*(unquote(each) for each in parts.path.split("/") if each), "", ""]
    rest = rest[:-2]
    revision = None
    if len(rest) > 2 and rest[0] in _OF_FILES:
        revision, rest = rest[1], rest[2:]
    if not rest or rest[0] in ("tree", *_OF_FILES):
        raise ArgumentError(
            f"{url} is a page of the hub and no file of it; give the hub id, such as {owner}/{repo}"
        )
    return HubFile(f"{owner}/{repo}", "/".join(rest), revision)


def bring_file(url: str, hub: Hub) -> Path | None:
    """Bring a file of the hub into its cache, unless it is there, and return its path.

    Args:
        url: of the file.
        hub: the cache and the token; its revision counts before that of the file, as in diffusers.

    Returns:
        The path; None if it is a URL of another server.

    Raises:
        ArgumentError: it names a repository and no file.
        SourceNotFound: there is no such file, or it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    file = hub_file_of(url)
    if file is None:
        return None
    where = hub.where | {"revision": hub.revision or file.revision}
    try:
        with resumed_gc():
            return Path(hf_hub_download(file.repo_id, file.name, **where))
    except Exception as exc:  # of the hub's HTTP client too, which changes with its version
        name = f"{file.repo_id}/{file.name}"
        raise SourceNotFound(f"{name}: {_in_a_line(exc)}") from exc
