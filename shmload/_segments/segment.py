"""A complete segment that this process holds a lease on, and how one is attached.

Guarantee: a segment with its final name, or with a digest in its header, is complete: the digest is
written after the last byte. The kernel holds the locks, so a process that dies leaves none behind.
A lease is a shared lock on an open descriptor, or on a mapping made from it (Python's mmap keeps a
duplicate). The states of a segment's file stand in the room's `__init__`.
"""

import enum
import os
import time

import msgspec

from shmload._checkpoints.formats.safetensors import read_header
from shmload._checkpoints.header import Header
from shmload._host.descriptors import Descriptor, wait_lock
from shmload._host.shm import is_named, shm_open
from shmload._segments.metadata import (
    KEEP_FOR_OFFSET,
    Metadata,
    main_dtype,
    parse_metadata,
    read_keep_for,
    read_metadata,
    write_keep_for,
)
from shmload._segments.mode import (
    FOR_VIEWS,
    PINNED,
    READ_ONLY,
    changing_mode,
    end_writing,
    is_for_views,
    is_pinned,
    is_shared,
    overwrite,
)
from shmload._segments.view_register import views_by_segment
from shmload.errors import SegmentCorrupt, ShmloadError, WrongFormat

_BEGIN_NBYTES = 64


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
        os.utime(self.fd, ns=(now, now))

    @property
    def is_shared(self) -> bool:
        """Whether its name is removed with its last lease."""
        return is_shared(os.fstat(self.fd))

    @property
    def is_pinned(self) -> bool:
        """Whether it is never evicted to make room, nor because it is idle."""
        return is_pinned(os.fstat(self.fd))

    def keep(self) -> None:
        """Make a shared segment resident: it stays without a lease.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        if self.is_shared:  # most are not: no load of these waits for another process
            with changing_mode(self.name):
                if self.is_shared:
                    os.fchmod(self.fd, READ_ONLY)

    def pin(self, *, for_views: bool = False) -> None:
        """Make it resident; it is never evicted to make room, nor because it is idle.

        Args:
            for_views: a view directory needs it; a pin of the user's stays the user's.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        with changing_mode(self.name):
            if not for_views:
                os.fchmod(self.fd, READ_ONLY | PINNED)
            elif not self.is_pinned:
                os.fchmod(self.fd, READ_ONLY | FOR_VIEWS)

    def unpin(self) -> None:
        """Undo `pin`, if no view directory needs it; its time to live begins now.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        with changing_mode(self.name):
            if self.is_pinned:
                self._end_pin(
                    READ_ONLY | FOR_VIEWS if self.name in views_by_segment() else READ_ONLY
                )

    def unpin_for_views(self) -> None:
        """Undo `pin(for_views=True)`; call it inside `changing_mode`."""
        if is_for_views(os.fstat(self.fd)):
            self._end_pin(READ_ONLY)

    def _end_pin(self, mode: int) -> None:
        self.touch()  # first: or it might be due already
        os.fchmod(self.fd, mode)

    @property
    def keep_for_s(self) -> int | None:
        """How long it stays while no process uses it, in seconds; 0 if nothing limits that.

        None if it is of a version that cannot say.
        """
        return read_keep_for(os.pread(self.fd, _BEGIN_NBYTES, 0))

    def keep_for(self, seconds: int) -> bool:
        """Set how long it stays while no process uses it; return False if it cannot say that.

        Args:
            seconds: the time; 0 for no limit.

        Raises:
            SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        """
        if self.keep_for_s is None:
            return False
        with changing_mode(self.name):
            overwrite(self.fd, write_keep_for(seconds), KEEP_FOR_OFFSET)
        return True

    def read_metadata(self) -> Metadata:
        """Read what its header says, in as little time for 1,000 tensors as for one.

        Raises:
            SegmentCorrupt: it is not one that shmload wrote.
        """
        metadata = read_metadata(self.fd)
        if metadata:
            return metadata
        header = self.read_header()
        try:
            metadata = parse_metadata(header.metadata)
        except ValueError as exc:
            raise SegmentCorrupt(self.name, str(exc)) from exc
        dtype = main_dtype(header.tensors, metadata.conversion)
        return msgspec.structs.replace(metadata, dtype=dtype)

    def read_header(self) -> Header:
        """Read the header.

        Raises:
            SegmentCorrupt: it is not one that shmload wrote.
        """
        try:
            return read_header(self.fd, self.name)
        except WrongFormat as exc:  # its remedy is one for files
            raise SegmentCorrupt(self.name, "it has no header") from exc
        except ShmloadError as exc:
            raise SegmentCorrupt(self.name, str(exc)) from exc


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
    segment = Segment(name, fd)
    try:
        end_writing(fd, name)
    except BaseException:
        segment.close()
        raise
    return segment
