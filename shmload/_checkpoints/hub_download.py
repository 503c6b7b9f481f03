"""Brings models of the hub into its cache, by the libraries' own downloads.

Guarantee: the bytes come, and the cache is filled, as without shmload.
"""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.library import library
from shmload._checkpoints.paths import not_found
from shmload._checkpoints.repository import files_of_model
from shmload._checkpoints.wanted import Hub, Wanted


def download(wanted: Wanted, kwargs: Mapping[str, Any], *, is_model: bool) -> Path:
    """Bring into the cache what a load needs, and return the repository's directory.

    Args:
        wanted: what to bring.
        kwargs: other arguments of `from_pretrained`.
        is_model: one model is wanted and not a whole pipeline.

    Raises:
        SourceNotFound: there is no such hub id, or it cannot be downloaded.
    """
    repo_id = str(wanted.source)
    try:
        return Path(_download_files(repo_id, wanted, kwargs, is_model=is_model))
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
    repo_id: str, wanted: Wanted, kwargs: Mapping[str, Any], *, is_model: bool
) -> str:
    from huggingface_hub import model_info, snapshot_download

    where = msgspec.structs.asdict(wanted.hub)
    subfolder = where.pop("subfolder") or ""
    del where["weight_name"]
    info = model_info(repo_id, revision=where["revision"], token=where["token"])
    names = {each.rfilename for each in info.siblings or ()}
    if "model_index.json" in names and not is_model:
        # diffusers knows which of a repository's files a pipeline needs.
        given = {name: value for name, value in kwargs.items() if name != "subfolder"}
        return library().download(repo_id, **{**given, **where, "variant": wanted.variant})
    files = files_of_model(
        names,
        subfolder=subfolder,
        variant=wanted.variant,
        weight_names=wanted.hub.weight_names,
        kwargs=kwargs,
    )
    patterns = [glob.escape(each) for each in files]
    return str(snapshot_download(repo_id, allow_patterns=patterns, **where))
