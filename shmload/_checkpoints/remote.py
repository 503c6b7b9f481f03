"""An object that is not on this machine, and the file that points to it.

Workers import this module at their start, so it imports little.
"""

import os
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
    if not isinstance(source, str):
        return False
    scheme, mark, _ = source.partition("://")
    return bool(mark) and scheme.lower() in _SCHEMES


def is_on_web_server(url: str) -> bool:
    """Tell whether a URL is of a web server, which has no list of its files."""
    return plain_url(url).startswith(("http://", "https://"))


def plain_url(url: str) -> str:
    """Return the one way to write a URL that may be written in several."""
    scheme, mark, rest = url.rstrip("/").partition("://")
    return f"{scheme.lower()}{mark}{rest}"


def mirrors_folder() -> Path:
    """Return the folder that all pointers are below."""
    return settings().cache_dir / "remote"


def mirror_home(url: str) -> Path:
    """Return the folder that all of a URL's mirror is below, whether there is one or not."""
    import hashlib

    return mirrors_folder() / hashlib.sha256(plain_url(url).encode()).hexdigest()[:20]


def write_pointer(path: Path, remote: RemoteObject) -> None:
    """Write the pointer to an object; its file has the object's length, and no blocks for it."""
    from shmload._host.files import replacing  # not at the top, for the workers

    content = MAGIC + msgspec.json.encode(remote) + b"\n"
    with replacing(path, mode=0o600) as file:
        file.write(content)
        file.truncate(max(remote.nbytes, len(content)))


def pointed_object(fd: int) -> RemoteObject | None:
    """Return the object that an open file points to; None if the file is no pointer.

    Raises:
        msgspec.DecodeError: the pointer is damaged.
    """
    if os.pread(fd, len(MAGIC), 0) != MAGIC:
        return None
    line = os.pread(fd, _MOST_LINE_NBYTES, len(MAGIC)).partition(b"\n")[0]
    return msgspec.json.decode(line, type=RemoteObject)
