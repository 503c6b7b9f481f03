"""How a process gets a segment: it attaches it, builds it, or waits for another that builds it."""

import os
import time
from collections.abc import Callable

from shmload._checkpoints.formats.safetensors import read_header
from shmload._host.descriptors import Descriptor
from shmload._host.linux import is_named, shm_open, try_lock, unlock
from shmload._segments.metadata import read_digest
from shmload._segments.names import part_name
from shmload._segments.part import Hollow, Part
from shmload._segments.segment import Segment, attach
from shmload.errors import SegmentTimeout, ShmloadError

_POLL_S = 0.01


class Awaited(Descriptor):
    """A segment that another process builds.

    Owns a descriptor of its part, which still leads to it when it is complete and has no name.
    """

    def __init__(self, name: str, fd: int) -> None:
        super().__init__(fd)
        self.name = name

    def wait(self, timeout_s: float, is_cancelled: Callable[[], bool] = bool) -> Segment | Part:
        """Attach what the other process publishes, or take its place if it dies.

        Raises:
            SegmentTimeout: it is still building after the deadline, or the wait was cancelled.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not is_cancelled():
            if try_lock(self.fd, exclusive=False):
                # With the name of a part its builder died before it could publish it.
                is_part = is_named(self.fd, part_name(self.name))
                if not is_part and _is_complete(self.fd, self.name):
                    return Segment(self.name, self.take())
                unlock(self.fd)  # or it would keep ourselves from taking over
                found = acquire(self.name)
                self.close()
                if not isinstance(found, Awaited):
                    return found
                self.fd = found.take()  # somebody else was quicker to take over
            time.sleep(_POLL_S)
        raise SegmentTimeout(self.name, timeout_s)


Opened = Segment | Part | Hollow
"""What has a file that can be mapped."""
Held = Opened | Awaited
"""What a load has of a shard's segment."""


def acquire(name: str) -> Segment | Part | Awaited:
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
