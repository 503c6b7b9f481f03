"""Segments in shared memory: how one comes to be, is attached, and goes.

    nothing --begin--> NAME.part, locked by its builder --publish--> NAME, leased by its users
                           |                                            |
                           | builder dies: the lock is free             | evict: only while nobody
                           v                                            v has a lease
                       taken over by whoever wants it next          nothing

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
import time
from collections.abc import Callable
from typing import Self

from shmload._checkpoints.formats.safetensors import read_header
from shmload._checkpoints.header import Header
from shmload._host.linux import (
    Inode,
    inode_of,
    is_named,
    shm_open,
    shm_rename,
    shm_unlink,
    try_lock,
    unlock,
    wait_lock,
    write_at,
)
from shmload._segments.layout import Layout
from shmload._segments.metadata import read_digest
from shmload._segments.names import new_part_name, part_name
from shmload.errors import SegmentCorrupt, SegmentTimeout, ShmloadError

_POLL_S = 0.01
_READ_ONLY = 0o400
# On a segment's file, where nobody executes anything: that it goes with its last lease.
_SHARED = stat.S_IXUSR


class Stay(enum.IntEnum):
    """How long a segment stays."""

    PRIVATE = 0
    """As long as its builder and those who waited for it have it; nobody else finds it."""
    SHARED = 1
    """As long as some process is attached; until then any process finds it."""
    RESIDENT = 2
    """Until it is evicted."""


class Segment:
    """A complete segment that this process holds a lease on.

    Owns one descriptor; `close` gives it, and the lease, back. Tensors already wrapped stay valid.
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
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
            os.fchmod(self.fd, _READ_ONLY)

    def pin(self) -> None:
        """Keep it, and keep it from being evicted to make room; the sticky bit tells."""
        os.fchmod(self.fd, _READ_ONLY | stat.S_ISVTX)

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

    Owns one descriptor until `publish` passes it on, or `close` gives everything back.
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self._digest_offset = 0
        self._is_published = False

    @property
    def inode(self) -> Inode:
        """What /proc/self/maps calls it."""
        return inode_of(os.fstat(self.fd))

    def prepare(self, layout: Layout) -> None:
        """Give it its length and its header. Its data reads as zeros until it is filled."""
        os.ftruncate(self.fd, layout.nbytes)
        write_at(self.fd, layout.header, 0)
        self._digest_offset = layout.digest_offset

    def renew(self) -> None:
        """Begin again in another inode, which nobody was lent; what the old one has is dropped."""
        fd = self._create_another()
        old, self.fd = self.fd, fd
        os.ftruncate(old, 0)
        unlock(old)  # whoever was lent the old one has its lock too; who waits for it begins anew
        os.close(old)

    def _create_another(self) -> int:
        # It takes the part's name in one step, so that nobody finds none and builds one of its own.
        name = new_part_name(self.name)
        while True:
            fd = shm_open(name, create=True, writable=True)
            assert fd is not None, "created if missing"
            try:
                # Whoever collects garbage may hold it for a moment, or have removed it.
                if wait_lock(fd, exclusive=True, timeout_s=1.0) and is_named(fd, name):
                    os.ftruncate(fd, 0)
                    shm_rename(name, part_name(self.name))
                    return fd
            except BaseException:
                shm_unlink(name)
                os.close(fd)
                raise
            os.close(fd)

    def publish(self, digest: str, stay: Stay) -> Segment:
        """Declare it complete.

        Args:
            digest: of its data, 32 hexadecimal digits.
            stay: how long it stays; it gets its final name unless it is private.
        """
        write_at(self.fd, digest.encode(), self._digest_offset)
        mark = _SHARED if stay is Stay.SHARED else 0
        if mark:  # before it has a name that would stay
            os.fchmod(self.fd, 0o600 | mark)
        if stay is Stay.PRIVATE:
            shm_unlink(part_name(self.name))
        else:
            shm_rename(part_name(self.name), self.name)
        # Not earlier: who takes over from a builder that dies right here must be able to open it.
        os.fchmod(self.fd, _READ_ONLY | mark)
        try_lock(self.fd, exclusive=False)
        self._is_published = True
        return Segment(self.name, self.fd)

    def close(self) -> None:
        """Remove it; again, or after `publish`, does nothing."""
        if self._is_published:
            return  # the descriptor is the segment's now
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if is_named(fd, part_name(self.name)):
                shm_unlink(part_name(self.name))
            unlock(fd)  # a mapping that is still around would keep the lock
            os.close(fd)


class Hollow:
    """What stands in for a segment whose bytes never come to lie in it: a header and no data.

    Models are built over it as over a part, while their bytes go elsewhere. It has no name, and
    takes no memory but for its header and the pages that somebody looks at. Owns one descriptor.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)

    @property
    def inode(self) -> Inode:
        """What /proc/self/maps calls it."""
        return inode_of(os.fstat(self.fd))

    def prepare(self, layout: Layout) -> None:
        """Give it its length and its header."""
        os.ftruncate(self.fd, layout.nbytes)
        write_at(self.fd, layout.header, 0)

    def close(self) -> None:
        """Give the descriptor back; again is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def is_shared(found: os.stat_result) -> bool:
    """Tell whether a segment's file goes when nobody is attached any more."""
    return bool(found.st_mode & _SHARED)


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


class Awaited:
    """A segment that another process builds.

    Owns a descriptor of its part, which still leads to it when it is complete and has no name.
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self._fd = fd

    def close(self) -> None:
        """Stop waiting; again is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def wait(self, timeout_s: float, is_cancelled: Callable[[], bool] = bool) -> Segment | Part:
        """Attach what the other process publishes, or take its place if it dies.

        Raises:
            SegmentTimeout: it is still building after the deadline, or the wait was cancelled.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not is_cancelled():
            if try_lock(self._fd, exclusive=False):
                # With the name of a part its builder died before it could publish it.
                is_part = is_named(self._fd, part_name(self.name))
                if not is_part and _is_complete(self._fd, self.name):
                    fd, self._fd = self._fd, -1
                    return Segment(self.name, fd)
                unlock(self._fd)  # or it would keep ourselves from taking over
                found = begin(self.name)
                self.close()
                if not isinstance(found, Awaited):
                    return found
                found._fd, self._fd = -1, found._fd  # somebody else was quicker to take over
            time.sleep(_POLL_S)
        raise SegmentTimeout(self.name, timeout_s)


Opened = Segment | Part | Hollow
"""What has a file that can be mapped."""
Held = Opened | Awaited
"""What a load has of a shard's segment."""


def begin(name: str) -> Segment | Part | Awaited:
    """Attach a segment, start to build it, or learn that another process does; never waits."""
    while True:
        segment = attach(name)
        if segment:
            return segment
        fd = shm_open(part_name(name), create=True, writable=True)
        assert fd is not None, "created if missing"
        is_mine = try_lock(fd, exclusive=True)
        # Between open and lock the builder may have published it, or somebody cleaned it up.
        if not is_named(fd, part_name(name)):
            os.close(fd)
            continue
        if not is_mine:
            return Awaited(name, fd)
        part = Part(name, fd)
        try:
            os.ftruncate(fd, 0)  # what a dead builder left takes room, and must not shine through
            segment = attach(name)
        except BaseException:
            part.close()  # or whoever wants it next, in this process too, would wait for its lock
            raise
        if segment:
            part.close()
            return segment
        return part


def _is_complete(fd: int, name: str) -> bool:
    try:
        return read_digest(read_header(fd, name).metadata) is not None
    except ShmloadError:
        return False  # its builder died before it had a header
