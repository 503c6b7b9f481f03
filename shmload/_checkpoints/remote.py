"""An object that is not on this machine, and the file that points to it.

Workers import this module at their start, so it imports little.
"""

import os
import posixpath
from pathlib import Path

import msgspec

from shmload._settings import settings

_SCHEMES = ("s3", "gs", "az", "https", "http")

MAGIC = b"shmload points to an object\n"
"""How a pointer begins: a file that holds an object's URL, size and tag, and none of its bytes."""
_MOST_LINE_NBYTES = 64 << 10


class RemoteObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object as it was when it was described; one with another tag has other bytes."""

    url: str
    nbytes: int
    tag: str
    """Its ETag, or the time of its last change where the server has no ETag."""


class FetchError(Exception):
    """An object cannot be read; str says why."""


class ObjectMissing(FetchError):
    """There is no such object."""


class ObjectChanged(FetchError):
    """The object is another one than the one that was described."""


def is_url(source: object) -> bool:
    """Tell whether a source is a URL that shmload reads."""
    return isinstance(source, str) and source.partition("://")[0] in _SCHEMES and "://" in source


def mirrors_folder() -> Path:
    """Return the folder that all pointers are below."""
    return settings().cache_dir / "remote"


def mirror_folder(url: str) -> Path:
    """Return where the mirror of a URL is, or would be: a directory, or a file for one object."""
    import hashlib

    plain = url.rstrip("/")
    home = mirrors_folder() / hashlib.sha256(plain.encode()).hexdigest()[:20]
    return home / posixpath.basename(plain)


def write_pointer(path: Path, wanted: RemoteObject) -> None:
    """Write the pointer to an object; its file has the object's length, and no blocks for it."""
    from shmload._host.files import replacing  # not at the top, for the workers

    content = MAGIC + msgspec.json.encode(wanted) + b"\n"
    with replacing(path, mode=0o600) as file:
        file.write(content)
        file.truncate(max(wanted.nbytes, len(content)))


def pointed_object(fd: int) -> RemoteObject | None:
    """Return the object that an open file points to; None if the file is no pointer.

    Raises:
        msgspec.DecodeError: the pointer is damaged.
    """
    if os.pread(fd, len(MAGIC), 0) != MAGIC:
        return None
    line = os.pread(fd, _MOST_LINE_NBYTES, len(MAGIC)).partition(b"\n")[0]
    return msgspec.json.decode(line, type=RemoteObject)
