"""Segments in shared memory: how one comes to be, is attached, and goes.

    nothing --begin--> NAME.part, locked by its builder --publish--> NAME, leased by its users
                           |                                            |
                           | builder dies: the lock is free             | evict: only while nobody
                           v                                            v has a lease
                       taken over by whoever wants it next          nothing

Guarantee: what has a final name is complete, and so is what has a digest in its header: the digest
is written after the last byte. The kernel holds the locks, so no death leaves one behind. A lease
is a shared lock on an open descriptor, or on a mapping made from it: Python's mmap keeps a
duplicate.
"""

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from shmload._errors import SegmentCorrupt, SegmentTimeout, ShmloadError
from shmload._header import Header, read_header
from shmload._layout import Layout, read_digest
from shmload._linux import (
    Inode,
    inode_of,
    is_named,
    shm_open,
    shm_rename,
    shm_unlink,
    try_lock,
    unlock,
    wait_lock,
)

PART_SUFFIX = ".part"
_POLL_S = 0.01


class Segment:
    """A complete segment that this process holds a lease on.

    Owns one descriptor; `close` gives it, and the lease, back. Tensors already wrapped stay valid.
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back; again is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def inode(self) -> Inode:
        """What /proc/self/maps calls it."""
        return inode_of(os.fstat(self.fd))

    @property
    def nbytes(self) -> int:
        """Size in bytes, header included."""
        return os.fstat(self.fd).st_size

    def read_header(self) -> Header:
        """Read the header.

        Raises:
            SegmentCorrupt: it is not one that shmload wrote.
        """
        try:
            return read_header(self.fd, self.name)
        except ShmloadError as exc:
            raise SegmentCorrupt(self.name, str(exc)) from exc


class Part:
    """A segment that this process builds: it holds the exclusive lock.

    Owns one descriptor until `publish` passes it on, or `abandon` gives everything back.
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self._digest_offset = 0

    @property
    def inode(self) -> Inode:
        """What /proc/self/maps calls it."""
        return inode_of(os.fstat(self.fd))

    def prepare(self, layout: Layout) -> None:
        """Give it its length and its header. Its data reads as zeros until it is filled."""
        os.ftruncate(self.fd, 0)  # what a dead builder left must not shine through
        os.ftruncate(self.fd, layout.nbytes)
        os.pwrite(self.fd, layout.header, 0)
        self._digest_offset = layout.digest_offset

    def publish(self, digest: str, *, keep: bool) -> Segment:
        """Declare it complete.

        Args:
            digest: of its data, 32 hexadecimal digits.
            keep: under its final name; else its name is removed, and it lives for as long as
                somebody has it attached or waits for it.
        """
        os.pwrite(self.fd, digest.encode(), self._digest_offset)
        os.fchmod(self.fd, 0o400)
        if keep:
            shm_rename(self.name + PART_SUFFIX, self.name)
        else:
            shm_unlink(self.name + PART_SUFFIX)
        try_lock(self.fd, exclusive=False)
        fd, self.fd = self.fd, -1
        return Segment(self.name, fd)

    def abandon(self) -> None:
        """Remove it; again, or after `publish`, does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if is_named(fd, self.name + PART_SUFFIX):
                shm_unlink(self.name + PART_SUFFIX)
            os.close(fd)


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


def begin(name: str) -> Segment | Part | None:
    """Attach a segment or start to build it; None while another process builds it. Never waits."""
    while True:
        segment = attach(name)
        if segment:
            return segment
        fd = shm_open(name + PART_SUFFIX, create=True, writable=True)
        assert fd is not None, "created if missing"
        if not try_lock(fd, exclusive=True):
            os.close(fd)
            return None
        # Between open and lock the builder may have published it, or somebody cleaned it up.
        if not is_named(fd, name + PART_SUFFIX):
            os.close(fd)
            continue
        part = Part(name, fd)
        segment = attach(name)
        if segment:
            part.abandon()
            return segment
        return part


def wait(name: str, timeout_s: float, is_cancelled: Callable[[], bool] = bool) -> Segment | Part:
    """Wait for another process's part: attach what it publishes, take over if it dies.

    Raises:
        SegmentTimeout: it is still building after the deadline.
    """
    deadline = time.monotonic() + timeout_s
    fd = shm_open(name + PART_SUFFIX, writable=True)
    try:
        while time.monotonic() < deadline and not is_cancelled():
            # A private segment loses its name when it is complete; this descriptor still leads to
            # it.
            if fd is not None and try_lock(fd, exclusive=False):
                if _is_complete(fd, name):
                    segment, fd = Segment(name, fd), None
                    return segment
                unlock(fd)  # or it would keep ourselves from taking over
            found = begin(name)
            if found:
                return found
            if fd is None:
                fd = shm_open(name + PART_SUFFIX, writable=True)
            time.sleep(_POLL_S)
    finally:
        if fd is not None:
            os.close(fd)
    raise SegmentTimeout(name, timeout_s)


def _is_complete(fd: int, name: str) -> bool:
    try:
        return read_digest(read_header(fd, name).metadata) is not None
    except ShmloadError:
        return False  # its builder died before it had a header
