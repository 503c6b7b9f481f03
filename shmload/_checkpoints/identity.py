"""What makes two files the same to shmload."""

import os
import re
from typing import Annotated, Self

import msgspec

from shmload._host.fingerprint import Fingerprint
from shmload._host.owned import belongs_here

_SHA256 = re.compile(r"[0-9a-f]{64}")


Nbytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
"""The size of a file, in bytes. The limit keeps sums of many within 64 bits."""


class Stat(msgspec.Struct, frozen=True, array_like=True):
    """What fstat says of a file that shows whether it has changed; see `os.stat_result`."""

    st_size: Nbytes
    st_mtime_ns: int
    st_ctime_ns: int
    st_nlink: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """Return it of what fstat said."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_nlink)


class Identity(msgspec.Struct, frozen=True):
    """A file as it was at one moment; after a change it has another identity."""

    path: str
    """Where it was found, links not resolved; not compared."""
    nbytes: int
    stamp: str
    """The blob's sha256 in a hub cache, else device, inode and both change times."""

    @property
    def key(self) -> str:
        """The text to compare."""
        return f"{self.nbytes}:{self.stamp}"


def identify(path: str | os.PathLike[str], found: os.stat_result) -> Identity:
    """Return the identity of a file from its path and what fstat says of it.

    A hub cache of this user or of root names each blob by its sha256, so that two snapshots, or a
    file downloaded twice, are one. Elsewhere the inode number alone is not enough: ext4 reuses a
    number at once.
    """
    real = os.path.realpath(path)
    folder, name = os.path.split(real)
    # Another user may have given any name to any bytes.
    if belongs_here(found) and os.path.basename(folder) == "blobs" and _SHA256.fullmatch(name):
        stamp = f"sha256={name}"
    else:
        _, *rest = Fingerprint.of(found)
        stamp = ".".join(map(str, rest))
    return Identity(os.path.abspath(path), found.st_size, stamp)


def is_unchanged(before: Stat | os.stat_result, after: os.stat_result) -> bool:
    """Tell whether an open file still has the bytes it had.

    The change time also moves when another file is renamed over this one. The descriptor then still
    reads the old bytes, so a new change time is accepted if the link count fell.
    """
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return False
    return before.st_ctime_ns == after.st_ctime_ns or after.st_nlink < before.st_nlink
