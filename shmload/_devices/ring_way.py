"""The way `ring`: threads copy bytes into a ring of pinned memory, devices fetch them from there.

It works for all bytes and on every device: where the driver pins nothing, copies are slower.
"""

from collections.abc import Sequence
from typing import Self

from shmload._decoding.ring import Ring
from shmload._devices.moves import Allocation, Moves
from shmload._devices.pinned import PinnedRing
from shmload._devices.runtime import Runtime
from shmload._devices.stream import Stream
from shmload._devices.upload import upload
from shmload._devices.way import Way, always_possible
from shmload._host.descriptors import Inode


class RingCopier:
    """Copies through a ring, which is pinned when the first bytes need it.

    Args:
        ring: stays the caller's.
        runtime: of the device that pins the ring's memory; None for not pinning it.
    """

    def __init__(self, ring: Ring, runtime: Runtime | None) -> None:
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
        """Copy the ring's slots while workers fill them: see `Copier`."""
        Stream(moves, hollow, self._ring, self._pin()).drain()

    def copy(
        self, allocations: Sequence[Allocation], files: Sequence[tuple[Inode, int]]
    ) -> Sequence[Allocation]:
        """Copy bytes of this process's memory: see `Copier`."""
        if allocations:
            upload(allocations, self._ring.shape, self._staging())
        return ()

    def _staging(self) -> PinnedRing:
        """Return the memory for bytes of this process.

        That is the ring, if the device can register it, or if workers have filled it: a second one
        would take the host's memory twice.
        """
        if self._own is None and self._pinned is None and self._runtime:
            memory = self._runtime.pinned(self._ring.shape.nbytes)
            if memory is not None:
                self._own = PinnedRing(self._ring, self._runtime, memory)
        return self._own or self._pin()

    def _pin(self) -> PinnedRing:
        if self._pinned is None:
            self._pinned = PinnedRing(self._ring, self._runtime)
        return self._pinned


RING = Way(name="ring", is_measured=True, why_not=always_possible, open=RingCopier)
