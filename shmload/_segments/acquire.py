"""How a process gets a segment: attach it, build it, or wait for the process that builds it."""

import os
import time
from collections.abc import Callable

from shmload._checkpoints.formats.safetensors import read_header
from shmload._host.descriptors import Descriptor, close, try_lock, unlock
from shmload._host.shm import is_named, shm_open
from shmload._segments.metadata import read_digest
from shmload._segments.names import part_name
from shmload._segments.part import Hollow, Part
from shmload._segments.segment import Segment, attach
from shmload._segments.users import holders
from shmload._wording import logger_of
from shmload.errors import SegmentTimeout, SegmentUntrusted, ShmloadError

logger = logger_of(__name__)

_POLL_S = 0.01


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
                if not is_part and _is_complete(self.fd, self.name):
                    return Segment(self.name, self.take())
                unlock(self.fd)  # or our own lock would keep us from taking over
                found = acquire(self.name, needs_name=self._needs_name)
                self.close()
                if not isinstance(found, Awaited):
                    return found
                self.fd = found.take()  # another process has taken over
            time.sleep(_POLL_S)
        part = part_name(self.name)
        pids = () if is_cancelled() else holders([part]).get(part, ())
        raise SegmentTimeout(self.name, timeout_s, pids=pids)


Opened = Segment | Part | Hollow
"""Has a file that can be mapped."""
Held = Opened | Awaited
"""A load holds one of these for each segment."""


def acquire(name: str, *, needs_name: bool = True) -> Segment | Part | Awaited:
    """Attach a segment, become its builder, or find that another process is.

    Does not wait for another builder. Waits at most 1 s for a segment that is being evicted.

    Args:
        name: of the segment.
        needs_name: other processes are to find it. If not, and another user has taken its name or
            its part's, it is built without a name.

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


def _acquire(name: str, *, needs_name: bool) -> Segment | Part | Awaited:
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
            segment = attach(name)
        except BaseException:
            part.close()  # or the next to acquire it, in this process too, would wait for its lock
            raise
        if segment:
            part.close()
            return segment
        return part


def _is_complete(fd: int, name: str) -> bool:
    try:
        return read_digest(read_header(fd, name).metadata) is not None
    except ShmloadError:
        return False  # its builder died before it wrote the header
