"""A complete segment that this process holds a lease on, and how one is attached.

Guarantee: a segment with its final name, or with a digest in its header, is complete: the digest is
written after the last byte. The kernel holds the locks, so a process that dies leaves none behind.
A lease is a shared lock on an open descriptor, or on a mapping made from it (Python's mmap keeps a
duplicate). The states of a segment's file stand in the package's `__init__`.

The mode of a complete segment is changed by one process at a time, and as a whole, so no change is
lost. A process that is killed while it publishes a segment, or writes into its header, leaves it
writable to its user; the next to attach it, or to change its mode, ends that.
"""

import contextlib
import enum
import os
import stat
import time
from collections.abc import Iterable, Iterator

from shmload._checkpoints.formats.safetensors import read_header
from shmload._checkpoints.header import Header
from shmload._host.descriptors import Descriptor, wait_lock
from shmload._host.shm import is_named, reopen_to_write, shm_open
from shmload._segments.metadata import (
    KEEP_FOR_OFFSET,
    Metadata,
    read_keep_for,
    read_metadata,
    write_keep_for,
)
from shmload._segments.names import segment_names, try_turn
from shmload.errors import (
    SegmentCorrupt,
    SegmentTimeout,
    SegmentUntrusted,
    ShmloadError,
)

# Two bits of the mode, which mean nothing else there, say how long a segment stays. That of shared
# ones is set for a part, too, which a private load makes.
READ_ONLY = 0o400
SHARED = stat.S_IXUSR
PINNED = stat.S_ISVTX

# A change takes microseconds: only a process that was stopped in the middle takes longer.
_TIMEOUT_S = 10.0
_POLL_S = 0.005


@contextlib.contextmanager
def changing_mode(what: str) -> Iterator[None]:
    """Be the one process that may change modes, inside the block.

    Args:
        what: the segment whose mode changes, for the error.

    Raises:
        SegmentTimeout: another process is in the middle of a change for 10 s.
        SharedMemoryFull: /dev/shm has no inodes left.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        with try_turn("mode") as is_mine:
            if is_mine:
                yield
                return
        time.sleep(_POLL_S)
    raise SegmentTimeout(
        f"segment {what} is still being pinned or given a time to stay by another process after "
        f"{_TIMEOUT_S:g} s; end that process",
        name=what,
    )


class Stay(enum.IntEnum):
    """How long a segment stays."""

    PRIVATE = 0
    """Until its builder, and the processes that waited for it, close it; no others find it."""
    SHARED = 1
    """Until its last lease is given back; any process finds it until then."""
    RESIDENT = 2
    """Until it is evicted."""


class Segment(Descriptor):
    """A complete segment that this process holds a lease on.

    Owns one descriptor; `close` gives it and the lease back. Tensors already wrapped stay valid.
    """

    def __init__(self, name: str, fd: int) -> None:
        super().__init__(fd)
        self.name = name

    @property
    def has_name(self) -> bool:
        """Whether other processes can find it by its name."""
        return is_named(self.fd, self.name)

    @property
    def nbytes(self) -> int:
        """Size in bytes, header included."""
        return os.fstat(self.fd).st_size

    def touch(self) -> None:
        """Record that it is used now; the least recently used segments are evicted first.

        Stored as the modification time: nothing writes to a segment, and reading keeps that time.
        """
        now = time.time_ns()  # the kernel's own time has steps of 4 ms, within which a load ends
        with contextlib.suppress(PermissionError):  # the process has become another user since
            os.utime(self.fd, ns=(now, now))

    @property
    def is_shared(self) -> bool:
        """Whether its name is removed with its last lease."""
        return os.fstat(self.fd).st_mode & (PINNED | SHARED) == SHARED

    @property
    def is_pinned(self) -> bool:
        """Whether it is never evicted to make room, nor because it is idle."""
        return bool(os.fstat(self.fd).st_mode & PINNED)

    def keep(self) -> None:
        """Make a shared segment resident: it stays without a lease.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        if self.is_shared:  # most are not: no load of these waits for another process
            with changing_mode(self.name):
                if self.is_shared:
                    os.fchmod(self.fd, READ_ONLY)

    def pin(self) -> None:
        """Make it resident; it is never evicted to make room, nor because it is idle.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        with changing_mode(self.name):
            os.fchmod(self.fd, READ_ONLY | PINNED)

    def unpin(self) -> None:
        """Undo `pin`; its time to live begins now.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        with changing_mode(self.name):
            if self.is_pinned:
                self.touch()  # first: or it might be due already
                os.fchmod(self.fd, READ_ONLY)

    @property
    def keep_for_s(self) -> int:
        """How long it stays while no process uses it, in seconds; 0 if nothing limits that."""
        return read_keep_for(self.fd)

    def keep_for(self, seconds: int) -> None:
        """Set how long it stays while no process uses it.

        Args:
            seconds: the time; 0 for no limit.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        with changing_mode(self.name):
            writable = reopen_to_write(self.fd)
            try:
                os.pwrite(writable, write_keep_for(seconds), KEEP_FOR_OFFSET)
            finally:
                os.close(writable)

    def read_metadata(self) -> Metadata:
        """Read what its header says, in as little time for 1,000 tensors as for one.

        Raises:
            SegmentCorrupt: it is not one that shmload wrote.
        """
        metadata = read_metadata(self.fd)
        if not metadata:
            raise self.corrupt("its header does not say what it holds")
        return metadata

    def corrupt(self, reason: str) -> SegmentCorrupt:
        """Return the error that says that it is corrupt, and why."""
        return SegmentCorrupt(
            f"segment {self.name} is corrupt: {reason}; remove it with `shmload rm {self.name}`",
            name=self.name,
        )

    def read_header(self) -> Header:
        """Read the header.

        Raises:
            SegmentCorrupt: it is not one that shmload wrote.
        """
        try:
            return read_header(self.fd, self.name)
        except ShmloadError as exc:  # its remedy is one for files
            raise self.corrupt("its header is damaged") from exc


def peek(name: str) -> Segment | None:
    """Open a segment or part without a lease; None if there is none, or it is another user's."""
    try:
        fd = shm_open(name)
    except SegmentUntrusted:
        return None
    return None if fd is None else Segment(name, fd)


def open_segments(names: Iterable[str] | None = None) -> Iterator[Segment]:
    """Open segments or parts in turn, without a lease; the next one closes it.

    Args:
        names: of them; None for all segments of this user.
    """
    for segment in filter(None, map(peek, segment_names() if names is None else names)):
        with segment:
            yield segment


def attach(name: str) -> Segment | None:
    """Take a lease on a resident segment, or return None if there is none.

    Raises:
        SegmentUntrusted: the name belongs to another user.
        SegmentTimeout, SharedMemoryFull: as `changing_mode`, of a segment that is still writable.
    """
    fd = shm_open(name)
    if fd is None:
        return None
    # A process that evicts it holds the exclusive lock for a moment; then the name is gone.
    if not (wait_lock(fd, exclusive=False, timeout_s=1.0) and is_named(fd, name)):
        os.close(fd)
        return None
    return finished(name, fd)


def finished(name: str, fd: int) -> Segment:
    """Return a complete segment, read-only from now on.

    Args:
        name: of the segment.
        fd: of it, with a lease; the segment's from now on, or closed.

    Raises:
        SegmentTimeout, SharedMemoryFull: as `changing_mode`, of a segment that is still writable.
    """
    segment = Segment(name, fd)
    try:
        if os.fstat(fd).st_mode & stat.S_IWUSR:  # a process was killed while it wrote
            with changing_mode(name):
                os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~stat.S_IWUSR)
    except BaseException:
        segment.close()
        raise
    return segment
