"""One file of a repository on the hub, named by the URL of its page or of its content.

Guarantee: such a file comes through the hub's own download, into its cache: with the user's token,
and under the sha256 by which the segments of a hub model are named.
"""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from shmload._checkpoints.hub_download import why_not_downloaded
from shmload._checkpoints.wanted import Hub
from shmload.errors import ArgumentError, SourceNotFound

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
# What stands before the revision in a URL.
_OF_FILES = ("blob", "resolve", "raw")


class HubFile(msgspec.Struct, frozen=True):
    """Where a file is on the hub."""

    repo_id: str
    name: str
    revision: str | None


def hub_file_of(url: str) -> HubFile | None:
    """Return the file of the hub that a URL means; None if it is a URL of another server.

    The forms are those that diffusers' `from_single_file` reads, and the hub's own of today:
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


def bring_file(wanted: HubFile, hub: Hub) -> Path:
    """Bring a file into the hub cache, unless it is there; return its path.

    Args:
        wanted: the file.
        hub: the cache and the token; its revision counts before that of the file, as in diffusers.

    Raises:
        SourceNotFound: there is no such file, or it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(
            wanted.repo_id,
            wanted.name,
            revision=hub.revision or wanted.revision,
            cache_dir=hub.cache_dir,
            token=hub.token,
            local_files_only=hub.local_files_only,
            force_download=hub.force_download,
        )
    except Exception as exc:  # of the hub's HTTP client too, which changes with its version
        name = f"{wanted.repo_id}/{wanted.name}"
        raise SourceNotFound(name, why_not_downloaded(exc, hub)) from exc
    return Path(found)
