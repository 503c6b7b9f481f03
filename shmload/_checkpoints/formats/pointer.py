"""Pointers: files that stand for an object in a bucket, and hold only its URL, size and tag.

They lie in the cache, under the names of the weights that they stand for. So a source in a bucket
looks like a directory, and only what reads weights has to know the difference. No library takes a
pointer for weights: it does not begin like a file of any other format.
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from shmload._checkpoints.header import HEAD_NBYTES, MAX_HEADER_NBYTES, Format, Header
from shmload._checkpoints.objects import fetch
from shmload._checkpoints.remote import (
    FRONT,
    MAGIC,
    FetchError,
    ObjectChanged,
    RemoteObject,
    mirrors_folder,
    pointed_object,
)
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source, replacing
from shmload._host.private import belongs_here, is_own, require_own
from shmload.errors import ShardChanged, ShardMalformed, ShardUnreadable, WrongFormat

_NAME = "pointer"
# One request gets the header of almost every file.
_FIRST_NBYTES = 512 << 10


def pointers_to(formats: tuple[Format, ...]) -> Format:
    """Return the format of files that point to objects in one of some formats."""
    return Format(
        name=_NAME,
        suffixes=(),
        base_names={},
        can_be_linked=False,
        recognises=lambda head: head.startswith(MAGIC),
        read_header=partial(_read_header, formats),
    )


def _read_header(formats: tuple[Format, ...], fd: int, path: str | os.PathLike[str]) -> Header:
    """Read the header of the object; it is fetched once and kept beside the pointer."""
    try:
        wanted = pointed_object(fd)
    except msgspec.DecodeError as exc:
        raise ShardMalformed(path, f"it is damaged: {exc}", _NAME) from exc
    assert wanted is not None
    named = next((each for each in formats if wanted.url.endswith(each.suffixes)), None)
    if named is None or named.header_end is None:
        read = " or ".join(each.name for each in formats if each.header_end)
        raise WrongFormat(
            wanted.url,
            named.name if named else "unknown",
            wanted.nbytes,
            f"it reads {read} there; download the file first",
            " from a bucket or a web server",
        )
    real = os.path.realpath(path)
    # It may have come with somebody else's model, and would use this user's credentials.
    if why := _why_not_own(real, fd):
        raise ShardMalformed(path, f"it points to an object, and {why}", _NAME, "give the URL")
    front = Path(f"{real}{FRONT}")
    try:
        if not is_own(front, wanted.nbytes):
            _fetch_front(wanted, front, named.header_end)
    except ObjectChanged as exc:
        raise ShardChanged(wanted.url) from exc
    except FetchError as exc:
        raise ShardUnreadable(wanted.url, str(exc)) from exc
    with Descriptor(open_source(front)) as opened:
        try:
            require_own(os.fstat(opened.fd), front)
        except PermissionError as exc:
            raise ShardUnreadable(wanted.url, str(exc)) from exc
        return named.read_header(opened.fd, wanted.url)


def _why_not_own(path: str, fd: int) -> str | None:
    """Return why an open pointer may not be this user's own; None if it is."""
    mirrors = os.path.realpath(mirrors_folder())
    if not path.startswith(f"{mirrors}{os.sep}"):
        return "is not in shmload's cache"
    try:
        if not belongs_here(os.lstat(mirrors_folder())):  # it may be a link
            return f"{mirrors_folder()} is another user's"
        if not os.path.samestat(os.lstat(path), os.fstat(fd)):
            return "was replaced"
        while path.startswith(mirrors):
            require_own(os.lstat(path), path)
            path = os.path.dirname(path)
    except OSError as exc:
        return str(exc)
    return None


def _fetch_front(wanted: RemoteObject, front: Path, header_end: Callable[[bytes], int]) -> None:
    """Write a file with the object's length and the bytes of its header.

    Raises:
        FetchError: the object cannot be read.
        ShardUnreadable: the cache cannot be written.
    """
    first = bytes(fetch(wanted, 0, min(_FIRST_NBYTES, wanted.nbytes)))
    end = header_end(first[:HEAD_NBYTES])
    if len(first) < end <= min(wanted.nbytes, MAX_HEADER_NBYTES):
        first += bytes(fetch(wanted, len(first), end))
    try:
        with replacing(front, mode=0o600) as file:
            file.write(first[:end])
            file.truncate(wanted.nbytes)
    except OSError as exc:
        raise ShardUnreadable(
            wanted.url,
            f"the cache {front.parent} cannot be written: {exc.strerror or exc}",
            exc.errno or errno.EIO,
            "make room there, check its permissions, or set SHMLOAD_CACHE_DIR",
        ) from exc
