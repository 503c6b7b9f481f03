"""The mirror of a source in a bucket or on a web server: a directory that looks like the source.

    CACHE/remote/ID/blobs/DIGEST             a small file, or the pointer to an object with weights
    CACHE/remote/ID/trees/KEY-DIGEST/NAME/.. links to them, by the names that the objects have

Guarantee: after `mirror` has returned, the mirror's links lead to the objects' content of that
moment, or to pointers to them. Weights are not fetched. A tree is complete and never changes, so
who reads it never sees parts of two lists. A blob is named by URL, ETag and size, as a hub cache
names its blobs by their content: so an object that is replaced has another blob and other segments.
"""

import hashlib
import os
import posixpath
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shmload._checkpoints.formats.known import OF_SEGMENTS, format_named, is_of_weights
from shmload._checkpoints.objects import fetch, in_parallel, require_readable_url
from shmload._checkpoints.remote import (
    FetchError,
    RemoteObject,
    mirror_home,
    plain_url,
    write_pointer,
)
from shmload._checkpoints.servers import Found, find_objects
from shmload._checkpoints.wanted import Wanted
from shmload._host.files import replacing
from shmload._host.private import is_own, open_private, require_own
from shmload.errors import SourceNotFound


def mirror(wanted: Wanted) -> Path:
    """Bring the mirror of a source up to date, or take it as it is for `local_files_only`.

    Args:
        wanted: its source is the URL of a prefix in a bucket, of a folder on a web server, or of
            one file of weights.

    Returns:
        The directory, or the file.

    Raises:
        ArgumentError: the URL cannot be read safely.
        LibraryError: obstore is not installed.
        SourceNotFound: there is nothing, or it cannot be read.
    """
    given = str(wanted.source)
    require_readable_url(given)
    url = plain_url(given)
    if is_of_weights(url) and format_named(url) is not OF_SEGMENTS:
        raise SourceNotFound(
            f"{given}: only {OF_SEGMENTS.name} are read from there; download the file first"
        )
    home, name = mirror_home(url), posixpath.basename(url)
    sought = (wanted.hub.folder, wanted.variant, wanted.hub.weight_names)
    key = _digest(msgspec.json.encode(sought))[:8]
    try:
        for folder in (home.parent, home, home / "blobs", home / "trees"):
            os.close(open_private(folder, make=not wanted.hub.local_files_only))
        if wanted.hub.local_files_only:
            trees = [each for each in (home / "trees").glob(f"{key}-*") if is_own(each, 0)]
            return max(trees, key=os.path.getmtime) / name
        return _write_tree(home, key, name, find_objects(url, wanted))
    except FetchError as exc:
        raise SourceNotFound(f"{given}: {exc}") from exc
    except (OSError, ValueError) as exc:
        if wanted.hub.local_files_only:
            reason = "not in the cache, and local_files_only forbids to ask"
            raise SourceNotFound(f"{given}: {reason}") from exc
        reason = f"its mirror {home} cannot be written: {exc}; set SHMLOAD_CACHE_DIR"
        raise SourceNotFound(f"{given}: {reason}") from exc


def _write_tree(home: Path, key: str, name: str, objects: Found) -> Path:
    """Write the tree of some objects, with the blobs that are missing; return its root."""
    blobs = home / "blobs"
    links = dict(
        zip(objects, in_parallel(lambda e: _blob(blobs, e), objects.values()), strict=True)
    )
    tree = home / "trees" / f"{key}-{_digest(msgspec.json.encode(sorted(links.items())))}"
    if is_own(tree, 0):
        os.utime(tree)  # it is the last one now
    else:
        _build(tree, name, {path: blobs / blob for path, blob in links.items()})
        require_own(os.lstat(tree), tree)
    return tree / name


def _blob(blobs: Path, wanted: RemoteObject) -> str:
    """Write an object's blob if it is not there; return its name."""
    name = _digest(f"{wanted.url}\n{wanted.tag}\n{wanted.nbytes}".encode())
    path = blobs / name
    if is_own(path, wanted.nbytes):
        return name
    if format_named(wanted.url):
        write_pointer(path, wanted)
    else:
        content = fetch(wanted, 0, wanted.nbytes)
        with replacing(path, mode=0o600) as file:
            file.write(content)
    return name


def _build(tree: Path, name: str, links: Mapping[str, Path]) -> None:
    """Make a tree of links; it gets its name when it is complete."""
    temporary = tree.with_name(f".{tree.name}.{os.urandom(4).hex()}")
    temporary.mkdir(mode=0o700)
    try:
        for path, target in links.items():
            link = temporary / name / path if path else temporary / name
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            link.symlink_to(target)
        try:
            temporary.rename(tree)
        except OSError:
            if not tree.is_dir():  # else another process has made the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _digest(content: bytes) -> str:
    """Return a name of 32 digits."""
    return hashlib.sha256(content).hexdigest()[:32]
