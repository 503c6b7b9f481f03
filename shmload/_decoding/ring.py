"""A ring of staging memory: slots that bytes pass through on their way to a device.

        free --take--> being filled --fill--> filled --(emptied)--> give back --> free

Guarantee: a slot has one of these states at a time, so nothing is overwritten before it was used.
Worker processes write to the memory through its descriptor. It has no name, and is freed when the
last process closes it.
"""

import contextlib
import mmap
import os
import queue
import threading
from typing import NamedTuple, Self

from shmload._host.memory import PAGE_NBYTES
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError

# Large enough for the reads that a worker has under way at a time, which are of one piece.
_SLOT_NBYTES = 16 << 20
# One being filled, one that waits in the worker's socket, one being emptied.
_SLOTS_PER_FILLER = 3


class RingShape(NamedTuple):
    """How a ring is divided."""

    slots: int
    slot_nbytes: int
    """A multiple of the page size."""

    @property
    def nbytes(self) -> int:
        """Size of the whole ring, in bytes."""
        return self.slots * self.slot_nbytes


def ring_shape(
    fillers: int,
    max_nbytes: int | None = None,
    slot_nbytes: int = _SLOT_NBYTES,
    slots_per_filler: int = _SLOTS_PER_FILLER,
) -> RingShape:
    """Choose the number and size of slots.

    Args:
        fillers: number of processes or threads that fill slots.
        max_nbytes: limit for the whole ring, in bytes; None for the fastest shape.
        slot_nbytes: size of the slots in the fastest shape, in bytes; a multiple of the page size.
        slots_per_filler: number of slots for each in the fastest shape.

    Raises:
        ArgumentError: the limit is below two pages.
    """
    slots = slots_per_filler * fillers
    if max_nbytes is None or max_nbytes >= slots * slot_nbytes:
        return RingShape(slots, slot_nbytes)
    if max_nbytes < 2 * PAGE_NBYTES:
        raise ArgumentError(
            f"{format_nbytes(max_nbytes)} of host memory is less than two pages; allow for some MiB"
        )
    # Prefer fewer slots to smaller ones: each copy to a device has a fixed cost.
    slots = max(2, min(slots, max_nbytes // (slot_nbytes // 4)))
    return RingShape(slots, max_nbytes // slots // PAGE_NBYTES * PAGE_NBYTES)


class FilledSlot(NamedTuple):
    """A piece whose bytes are in a slot."""

    shard: int
    """Index of its job in the decode."""
    begin: int
    """Where the piece begins in the segment, in bytes."""
    nbytes: int
    offset: int
    """Where the slot begins in the ring, in bytes."""


class Ring:
    """The memory and the state of its slots; thread-safe. A context that closes it.

    Args:
        shape: number and size of its slots.

    Raises:
        OSError: descriptors or address space ran out.
    """

    def __init__(self, shape: RingShape) -> None:
        self.shape = shape
        self.filled: queue.SimpleQueue[FilledSlot | None]
        """Filled slots in order; None after the last one."""
        self._lock = threading.Lock()
        self.reset()
        with contextlib.ExitStack() as undoing:
            self.fd = os.memfd_create("shmload-ring", os.MFD_CLOEXEC)
            undoing.callback(os.close, self.fd)
            # Pages are allocated as they are filled: allocating all first would delay the workers.
            os.ftruncate(self.fd, shape.nbytes)
            self.memory = mmap.mmap(self.fd, shape.nbytes)
            """Unmapped when its last view is gone, which may be after `close`."""
            self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            """Becomes readable when a slot is free again."""
            undoing.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def take(self) -> int | None:
        """Return the offset of a free slot, in bytes, or None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, offset: int) -> None:
        """Mark a slot free; no thread or process may still use it."""
        with self._lock:
            self._free.append(offset)
            if self.wake_fd >= 0:
                os.eventfd_write(self.wake_fd, 1)

    def rest(self) -> None:
        """Reset `wake_fd`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def reset(self) -> None:
        """Mark all slots free; no thread or process may still use them."""
        with self._lock:
            self.filled = queue.SimpleQueue()
            self._free = [n * self.shape.slot_nbytes for n in range(self.shape.slots)]

    def close(self) -> None:
        """Close the descriptors; a second call is fine."""
        with self._lock:
            fds = self.fd, self.wake_fd
            self.fd = self.wake_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
