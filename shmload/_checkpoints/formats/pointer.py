"""Pointers: files that stand for an object in a bucket, and hold only its URL, size and tag.

They lie in the cache, under the names of the weights that they stand for. So a source in a bucket
looks like a directory, and only what reads weights has to know the difference. No library takes a
pointer for weights: it does not begin like a file of any other format.
"""

import os
from pathlib import Path

import msgspec

from shmload._checkpoints.formats.safetensors import SAFETENSORS, read_front
from shmload._checkpoints.header import Format, Header
from shmload._checkpoints.objects import fetch
from shmload._checkpoints.remote import (
    MAGIC,
    FetchError,
    ObjectChanged,
    mirrors_folder,
    pointed_object,
)
from shmload._host.files import unreadable
from shmload._host.memo import Memo
from shmload._host.private import require_own
from shmload.errors import ShardChanged, ShardMalformed

_NAME = "pointer"
# One request gets the header of almost every file.
_FIRST_NBYTES = 512 << 10


def _read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read the header of the object; it is fetched once and remembered."""
    try:
        wanted = pointed_object(fd)
    except msgspec.DecodeError as exc:
        raise ShardMalformed(
            f"{path} is a damaged pointer: {exc}; load its URL again", path=path
        ) from exc
    assert wanted is not None
    if not wanted.url.endswith(SAFETENSORS.suffixes):
        raise ShardMalformed(
            f"{wanted.url}: of the files in a bucket or on a web server shmload reads "
            f"{SAFETENSORS.name}; download it first",
            path=wanted.url,
        )
    real = Path(os.path.realpath(path))
    # It may have come with somebody else's model, and would use this user's credentials.
    try:
        _require_in_cache(real, fd)
    except OSError as exc:
        raise ShardMalformed(f"{path} points to an object: {exc}; give the URL", path=path) from exc
    memo = Memo("headers", bytes, (wanted.url, wanted.tag, wanted.nbytes))
    kept = memo.read() or b""

    def read(nbytes: int, begin: int) -> bytes:
        nonlocal kept
        if begin + nbytes > len(kept):
            end = min(max(begin + nbytes, _FIRST_NBYTES), wanted.nbytes)
            kept += bytes(fetch(wanted, len(kept), end))
        return kept[begin : begin + nbytes]

    try:
        header = read_front(read, wanted.nbytes, wanted.url)
    except ObjectChanged as exc:
        raise ShardChanged(
            f"{wanted.url} changed while it was read; load again when no process writes to it",
            path=wanted.url,
        ) from exc
    except FetchError as exc:
        raise unreadable(wanted.url, str(exc)) from exc
    memo.write(kept[: header.data_offset])
    return header


def _require_in_cache(path: Path, fd: int) -> None:
    """Refuse an open pointer that is not this user's own.

    Raises:
        OSError: it is outside the cache, was replaced, or other users can have written it.
    """
    mirrors = mirrors_folder()
    if not path.is_relative_to(os.path.realpath(mirrors)):
        raise PermissionError("it is not in shmload's cache")
    if not os.path.samestat(os.lstat(path), os.fstat(fd)):
        raise PermissionError("it was replaced")
    for each in (path, path.parent, path.parent.parent, mirrors):
        require_own(os.lstat(each), each)


POINTER = Format(
    name=_NAME,
    suffixes=(),
    base_names={},
    can_be_linked=False,
    recognises=lambda head: head.startswith(MAGIC),
    read_header=_read_header,
)
