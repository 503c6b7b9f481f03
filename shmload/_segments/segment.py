"""Segments in shared memory: how one comes to be, is attached, and goes.

    nothing --acquire--> NAME.part, locked by its builder --publish--> NAME, leased by its users
                         |                                            |
                         | builder dies: the lock is free             | evict: only while it
                         v                                            v has no lease
                     taken over by the next to acquire it          nothing

A segment may also be private, and never get a name, or shared, and lose it when nobody is attached
any more: whoever gives the last lease back removes it, or else whoever finds it without one.

Guarantee: what has a final name is complete, and so is what has a digest in its header: the digest
is written after the last byte. The kernel holds the locks, so no death leaves one behind. A lease
is a shared lock on an open descriptor, or on a mapping made from it: Python's mmap keeps a
duplicate.
"""

import enum
import os
import stat

from shmload._checkpoints.formats.safetensors import read_header
from shmload._checkpoints.header import Header
from shmload._host.descriptors import Descriptor
from shmload._host.linux import is_named, shm_open, wait_lock
from shmload.errors import SegmentCorrupt, ShmloadError

# A segment's permissions say how long it stays: nobody executes it, and nobody but its owner may
# read it.
READ_ONLY = 0o400
SHARED = stat.S_IXUSR
"""It goes with its last lease."""
_PROTECTED = stat.S_ISVTX


class Stay(enum.IntEnum):
    """How long a segment stays."""

    PRIVATE = 0
    """As long as its builder and those who waited for it have it; nobody else finds it."""
    SHARED = 1
    """As long as some process is attached; until then any process finds it."""
    RESIDENT = 2
    """Until it is evicted."""


class Segment(Descriptor):
    """A complete segment that this process holds a lease on.

    Owns one descriptor; `close` gives it, and the lease, back. Tensors already wrapped stay valid.
    """

    def __init__(self, name: str, fd: int) -> None:
        super().__init__(fd)
        self.name = name

    @property
    def has_name(self) -> bool:
        """Whether it has a name, for other processes to find."""
        return is_named(self.fd, self.name)

    @property
    def nbytes(self) -> int:
        """Size in bytes, header included."""
        return os.fstat(self.fd).st_size

    def touch(self) -> None:
        """Note that it is used now, for whoever evicts what was used least recently.

        The time of modification tells: nothing writes to a segment, and reading leaves it alone.
        """
        os.utime(self.fd)

    @property
    def is_shared(self) -> bool:
        """Whether it goes when nobody is attached any more."""
        return is_shared(os.fstat(self.fd))

    def keep(self) -> None:
        """Have it stay when nobody is attached any more."""
        if self.is_shared:
            os.fchmod(self.fd, READ_ONLY)

    def protect(self) -> None:
        """Make it resident, and tell the service never to evict it to make room."""
        os.fchmod(self.fd, READ_ONLY | _PROTECTED)

    def read_header(self) -> Header:
        """Read the header.

        Raises:
            SegmentCorrupt: it is not one that shmload wrote.
        """
        try:
            return read_header(self.fd, self.name)
        except ShmloadError as exc:
            raise SegmentCorrupt(self.name, str(exc)) from exc


def is_shared(found: os.stat_result) -> bool:
    """Tell whether a segment's file goes when nobody is attached any more."""
    return bool(found.st_mode & SHARED)


def is_protected(found: os.stat_result) -> bool:
    """Tell whether the service never evicts a segment to make room."""
    return bool(found.st_mode & _PROTECTED)


def attach(name: str) -> Segment | None:
    """Take a lease on a resident segment, or return None if there is none.

    Raises:
        SegmentUntrusted: the name belongs to somebody else.
    """
    fd = shm_open(name)
    if fd is None:
        return None
    # Whoever evicts holds the exclusive lock for a moment, and then the name is gone.
    if wait_lock(fd, exclusive=False, timeout_s=1.0) and is_named(fd, name):
        return Segment(name, fd)
    os.close(fd)
    return None
