"""How a process gets a segment: attach it, build it, or wait for the process that builds it.

A segment that is being built is a part.
"""

import os
import time
from collections.abc import Callable

from shmload._host.descriptors import Descriptor, close, try_lock, unlock
from shmload._host.shm import is_named, removed, reopen, shm_open, shm_rename, shm_unlink, write_at
from shmload._segments.layout import Layout
from shmload._segments.listing import holders
from shmload._segments.metadata import DIGEST_OFFSET, read_metadata
from shmload._segments.names import part_name
from shmload._segments.segment import PINNED, READ_ONLY, SHARED, Segment, Stay, attach, finished
from shmload._wording import logger_of, name_processes
from shmload.errors import SegmentTimeout, SegmentUntrusted

logger = logger_of(__name__)

_POLL_S = 0.01


class Part(Descriptor):
    """A segment that this process builds: it holds the exclusive lock.

    Owns one descriptor, until `publish` makes it the segment's or `close` removes the part.

    Args:
        name: of the segment.
        fd: of the part, locked; None for one without a name in /dev/shm, which stays private.
    """

    def __init__(self, name: str, fd: int | None) -> None:
        super().__init__(_make_nameless(name) if fd is None else fd)
        self.name = name
        self.has_name = fd is not None
        self._is_published = False

    def prepare(self, layout: Layout) -> None:
        """Set its length and write its header. Its data reads as zeros until it is filled."""
        os.ftruncate(self.fd, layout.nbytes)
        write_at(self.fd, layout.header, 0)

    def publish(self, digest: str, stay: Stay, *, is_pinned: bool = False) -> Segment:
        """Write the digest and give the part its final name.

        Args:
            digest: of its data, 32 hexadecimal digits.
            stay: how long the segment stays; a private one gets no name.
            is_pinned: whether it is pinned from the first.

        Returns:
            The segment, which owns the descriptor from now on.

        Raises:
            SegmentError: the part's name was removed from outside, and the segment needs one.
            SegmentUntrusted: the segment's name belongs to another user, likewise.
        """
        # Another load may have begun a part of that name since, which must not be renamed.
        is_mine = is_named(self.fd, part_name(self.name))
        if not is_mine and stay is not Stay.PRIVATE:
            raise removed(part_name(self.name))
        write_at(self.fd, digest.encode(), DIGEST_OFFSET)
        mark = SHARED if stay is Stay.SHARED else PINNED if is_pinned else 0
        if mark:  # before the rename: if this process dies after it, the mode tells who removes it
            os.fchmod(self.fd, 0o600 | mark)
        with Descriptor(reopen(self.fd)) as readable:
            if stay is Stay.PRIVATE:
                if is_mine:
                    shm_unlink(part_name(self.name))
            else:
                shm_rename(part_name(self.name), self.name)
            # After the rename: if this process dies before it, the next builder must be able to
            # write.
            os.fchmod(self.fd, READ_ONLY | mark)
            for fd in (self.fd, readable.fd):
                try_lock(fd, exclusive=False)
            unlock(self.fd)  # mappings of the part would keep that lock
            # Keep the descriptor's number: another thread may be mapping the part by that number.
            os.dup2(readable.fd, self.fd, inheritable=False)
        self._is_published = True
        return Segment(self.name, self.fd)

    def close(self) -> None:
        """Remove the part; again, or after `publish`, does nothing."""
        if self._is_published:
            return  # the descriptor is the segment's now
        fd = self.take()
        if fd >= 0:
            if is_named(fd, part_name(self.name)):
                shm_unlink(part_name(self.name))
            close(fd)  # this also unlocks it, which a mapping that is left would prevent


def _make_nameless(name: str) -> int:
    """Make a file in memory that only its descriptor leads to; it is shown by the name."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    try_lock(fd, exclusive=True)
    return fd


class Awaited(Descriptor):
    """A segment that another process builds.

    Owns a descriptor of the part; it leads to the segment even if that never gets a name.
    """

    def __init__(self, name: str, fd: int, *, needs_name: bool) -> None:
        super().__init__(fd)
        self.name = name
        self._needs_name = needs_name

    def wait(self, timeout_s: float, is_cancelled: Callable[[], bool] = bool) -> Segment | Part:
        """Attach the segment once it is complete, or become its builder if the other process dies.

        Raises:
            SegmentTimeout: it is not complete after `timeout_s` seconds, or the wait was cancelled.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not is_cancelled():
            if try_lock(self.fd, exclusive=False):
                # If it still has a part's name its builder died before it could publish it.
                is_part = is_named(self.fd, part_name(self.name))
                metadata = read_metadata(self.fd)
                if not is_part and metadata and metadata.digest:
                    fd = reopen(self.fd)  # this one can write
                    try_lock(fd, exclusive=False)
                    self.close()
                    return finished(self.name, fd)
                unlock(self.fd)  # or our own lock would keep us from taking over
                found = acquire(self.name, needs_name=self._needs_name)
                self.close()
                if not isinstance(found, Awaited):
                    return found
                self.fd = found.take()  # another process has taken over
            time.sleep(_POLL_S)
        part = part_name(self.name)
        pids = () if is_cancelled() else holders([part]).get(part, ())
        by = name_processes(pids) if pids else "another process"
        raise SegmentTimeout(
            f"segment {self.name} is still being decoded by {by} after {timeout_s:g} s; raise "
            "SHMLOAD_WAIT_TIMEOUT_S or end that process",
            name=self.name,
        )


Held = Segment | Part | Awaited
"""A load holds one of these for each segment."""


def acquire(name: str, *, needs_name: bool = True) -> Held:
    """Attach a segment, become its builder, or find that another process is.

    Does not wait for another builder. Waits at most 1 s for a segment that is being evicted.

    Args:
        name: of the segment.
        needs_name: other processes are to find it. If not, its part counts for no budget; and if
            another user has taken its name or its part's, it is built without a name.

    Raises:
        SegmentUntrusted: the name belongs to another user, and the segment needs it.
        SharedMemoryFull: /dev/shm has no inodes left.
    """
    try:
        return _acquire(name, needs_name=needs_name)
    except SegmentUntrusted as exc:
        if needs_name:
            raise
        logger.warning("%s; this process decodes for itself alone", exc)
        return Part(name, None)


def _acquire(name: str, *, needs_name: bool) -> Held:
    while True:
        segment = attach(name)
        if segment:
            return segment
        fd = shm_open(part_name(name), create=True, writable=True)
        assert fd is not None, "created if missing"
        is_mine = try_lock(fd, exclusive=True)
        # Between open and lock its builder may have published it, or a process removed it.
        if not is_named(fd, part_name(name)):
            close(fd)
            continue
        if not is_mine:
            return Awaited(name, fd, needs_name=needs_name)
        part = Part(name, fd)
        try:
            os.ftruncate(fd, 0)  # a dead builder's bytes take room and must not be read as data
            os.fchmod(fd, 0o600 if needs_name else 0o600 | SHARED)
            segment = attach(name)
        except BaseException:
            part.close()  # or the next to acquire it, in this process too, would wait for its lock
            raise
        if segment:
            part.close()
            return segment
        return part
