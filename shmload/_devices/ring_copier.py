"""Threads copy bytes into a ring of pinned memory, and devices fetch them from there.

It works for all bytes and on every device: where the driver pins nothing, copies are slower.
"""

from collections.abc import Sequence
from typing import Self

from shmload._decoding.ring import Ring
from shmload._devices.moves import Allocation, Moves
from shmload._devices.pinned import PinnedRing
from shmload._devices.stream import Stream
from shmload._devices.upload import upload
from shmload._host.descriptors import Inode
from shmload._runtimes.runtime import Runtime


class RingCopier:
    """Copies through a ring, pinned when the first bytes need it; a context that unpins it.

    When one of its methods raises, no copy is under way and nothing stays pinned after the context.

    Args:
        ring: stays the caller's.
        runtime: of the device that pins the ring's memory.
    """

    def __init__(self, ring: Ring, runtime: Runtime) -> None:
        self._ring = ring
        self._runtime = runtime
        self._pinned: PinnedRing | None = None
        self._own: PinnedRing | None = None  # memory that only this process fills

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pinned in (self._pinned, self._own):
            if pinned:
                pinned.close()
        self._pinned = self._own = None

    def stream(self, moves: Moves, hollow: Sequence[Inode]) -> None:
        """Copy the ring's slots while workers fill them; blocks until the last one is copied.

        Args:
            moves: where the bytes go.
            hollow: the files that the tensors seem to lie in, by the number that slots name.

        Raises:
            torch.OutOfMemoryError: the device is full.
            RuntimeError: a driver failed.
        """
        Stream(moves, hollow, self._ring, self._pin()).drain()

    def copy(self, allocations: Sequence[Allocation]) -> None:
        """Copy bytes of this process's memory to allocations; blocks until all bytes are there.

        Args:
            allocations: on any of the load's devices.

        Raises:
            torch.OutOfMemoryError: a device is full.
            RuntimeError: a driver failed.
        """
        if allocations:
            upload(allocations, self._ring.shape, self._staging())

    def _staging(self) -> PinnedRing:
        """Return the memory for bytes of this process.

        That is the ring, if the device can register it, or if workers have filled it: a second one
        would take the host's memory twice.
        """
        if self._own is None and self._pinned is None:
            memory = self._runtime.pinned(self._ring.shape.nbytes)
            if memory is not None:
                self._own = PinnedRing(self._ring, self._runtime, memory)
        return self._own or self._pin()

    def _pin(self) -> PinnedRing:
        if self._pinned is None:
            self._pinned = PinnedRing(self._ring, self._runtime)
        return self._pinned
