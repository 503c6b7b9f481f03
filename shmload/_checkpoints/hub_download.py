"""Brings models of the hub into its cache, by the libraries' own downloads.

Guarantee: the bytes come, and the cache is filled, as without shmload. Who follows a download may
use each file as soon as it is there.
"""

import contextlib
import glob
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.incoming import Incoming, parts_there
from shmload._checkpoints.library import library
from shmload._checkpoints.paths import not_found
from shmload._checkpoints.repository import files_of_model
from shmload._checkpoints.wanted import Hub, Wanted

Follow = Callable[[Incoming], contextlib.AbstractContextManager[None]]
"""Makes a context that lasts as long as a download, and may use what that brings."""


def download(
    wanted: Wanted, kwargs: Mapping[str, Any], follow: Follow | None, *, is_model: bool
) -> Path:
    """Bring into the cache what a load needs, and return the repository's directory.

    Args:
        wanted: what to bring.
        kwargs: other arguments of `from_pretrained`.
        follow: lasts as long as the download.
        is_model: one model is wanted and not a whole pipeline.

    Raises:
        SourceNotFound: there is no such hub id, or it cannot be downloaded.
    """
    repo_id = str(wanted.source)
    try:
        return Path(_download_files(repo_id, wanted, kwargs, follow, is_model=is_model))
    except Exception as exc:  # of the hub's HTTP client too, which changes with its version
        reason = why_not_downloaded(exc, wanted.hub)
        raise not_found(
            repo_id, f"no such file or directory, and it cannot be downloaded: {reason}"
        ) from exc


def why_not_downloaded(exc: Exception, hub: Hub) -> str:
    """Say why a download failed, in a line: the hub's own first line may be `404 Client Error`."""
    from huggingface_hub import errors

    if isinstance(exc, errors.GatedRepoError):  # a RepositoryNotFoundError too
        return "its owner grants access, and has granted none to your token; ask on its page"
    if isinstance(exc, errors.RepositoryNotFoundError):
        return (
            "the hub has none of that name, or it is private: give a token that may read it "
            "(token=, HF_TOKEN, or `hf auth login`)"
        )
    if isinstance(exc, errors.RevisionNotFoundError):
        return f"the hub has no revision {hub.revision!r} of it"
    return next(iter(str(exc).splitlines()), type(exc).__name__)


def _download_files(
    repo_id: str,
    wanted: Wanted,
    kwargs: Mapping[str, Any],
    follow: Follow | None,
    *,
    is_model: bool,
) -> str:
    from huggingface_hub import model_info, snapshot_download

    where = msgspec.structs.asdict(wanted.hub)
    subfolder = where.pop("subfolder") or ""
    del where["weight_name"]
    info = model_info(repo_id, revision=where["revision"], token=where["token"])
    names = frozenset(each.rfilename for each in info.siblings or ())
    is_pipeline = "model_index.json" in names and not is_model
    following: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if follow and info.sha and not wanted.hub.weight_names:
        following = follow(_incoming(wanted, kwargs, names, info.sha, is_pipeline=is_pipeline))
    if is_pipeline:
        # diffusers knows which of a repository's files a pipeline needs.
        given = {name: value for name, value in kwargs.items() if name != "subfolder"}
        bring = library().download
        with following:
            return bring(repo_id, **{**given, **where, "variant": wanted.variant})
    files = files_of_model(
        names,
        subfolder=subfolder,
        variant=wanted.variant,
        weight_names=wanted.hub.weight_names,
        kwargs=kwargs,
    )
    patterns = [glob.escape(each) for each in files]
    with following:
        return str(snapshot_download(repo_id, allow_patterns=patterns, **where))


def _incoming(
    wanted: Wanted,
    kwargs: Mapping[str, Any],
    names: frozenset[str],
    commit: str,
    *,
    is_pipeline: bool,
) -> Incoming:
    """Describe the download of a commit; call it before the download begins."""
    from huggingface_hub import constants

    cache = Path(wanted.hub.cache_dir or constants.HF_HUB_CACHE)
    repository = f"models--{str(wanted.source).replace('/', '--')}"
    snapshot = cache / repository / "snapshots" / commit
    return Incoming(
        wanted=wanted,
        names=names,
        snapshot=snapshot,
        is_pipeline=is_pipeline,
        passed=frozenset(kwargs),
        use_safetensors=kwargs.get("use_safetensors"),
        before=parts_there(snapshot, names),
    )
