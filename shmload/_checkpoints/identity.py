"""What makes two files the same to shmload."""

import os
import re
from typing import Annotated, Self

import msgspec

from shmload._host.fingerprint import Fingerprint
from shmload._host.private import belongs_here

_HUB_BLOB = re.compile(r".*/blobs/([0-9a-f]{64})", re.DOTALL)
# Whatever the cache is called: listings show segments of other caches, too.
_MIRROR_BLOB = re.compile(r".*/remote/[0-9a-f]{20}/blobs/[0-9a-f]{32}", re.DOTALL)

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
    """Device, inode and both change times; the name of a blob in the mirror of a bucket."""

    @property
    def key(self) -> str:
        """The text to compare."""
        return f"{self.nbytes}:{self.stamp}"


def identify(path: str | os.PathLike[str], found: os.stat_result) -> Identity:
    """Return the identity of a file from its path and what fstat says of it.

    All symbolic and hard links to one file have the same identity, so two snapshots of a hub cache
    share it. The inode number alone is not enough: ext4 reuses a number at once. A blob in the
    mirror of a bucket is identified by its name, a digest of the object's URL, ETag and size: the
    file is only a pointer, and each load changes its times. A blob of a hub cache is a file like
    others: one that was damaged and downloaded again must not keep its damaged segment.
    """
    real = os.path.realpath(path)
    # Another user may have given any name to any bytes.
    if belongs_here(found) and _MIRROR_BLOB.fullmatch(real):
        stamp = f"object={os.path.basename(real)}"
    else:
        _, *rest = Fingerprint.of(found)
        stamp = ".".join(map(str, rest))
    return Identity(os.path.abspath(path), found.st_size, stamp)


def lasting_key(path: str | os.PathLike[str], found: os.stat_result) -> str:
    """Return text that tells a file apart on other hosts and after years, not only here and now.

    A blob in a hub cache of this user or of root keeps its key when it is copied or downloaded
    again: the sha256 by which the hub names it, and its size. Its bytes are not compared with that
    name. The key of another file is that of its `Identity`.

    Args:
        path: of the file, or of a link to it.
        found: what stat says of the file.
    """
    blob = _HUB_BLOB.fullmatch(os.path.realpath(path))
    if blob and belongs_here(found):
        return f"{found.st_size}:sha256={blob[1]}"
    return identify(path, found).key


def is_unchanged(before: Stat | os.stat_result, after: os.stat_result) -> bool:
    """Tell whether an open file still has the bytes it had.

    The change time also moves when another file is renamed over this one. The descriptor then still
    reads the old bytes, so a new change time is accepted if the link count fell.
    """
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return False
    return before.st_ctime_ns == after.st_ctime_ns or after.st_nlink < before.st_nlink
