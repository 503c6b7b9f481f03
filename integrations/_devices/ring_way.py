"""The way `ring`: threads copy bytes into a ring of pinned memory, devices fetch them from there.

It works for all bytes and on every device: where the driver pins nothing, copies are slower.
"""

from collections.abc import Sequence
from typing import Self

from shmload._decoding.ring import Ring
from shmload._host.linux import Inode
from shmload.integrations._devices.moves import Allocation, Moves
from shmload.integrations._devices.pinned import PinnedRing
from shmload.integrations._devices.runtime import Runtime
from shmload.integrations._devices.stream import Stream
from shmload.integrations._devices.upload import upload
from shmload.integrations._devices.way import Way, always_possible


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned:
            pinned.close()

    def stream(self, moves: Moves, hollow: Sequence[Inode]) -> None:
        """Copy the ring's slots while workers fill them: see `Copier`."""
        Stream(moves, hollow, self._ring, self._pin()).drain()

    def copy(
        self, allocations: Sequence[Allocation], files: Sequence[tuple[Inode, int]]
    ) -> Sequence[Allocation]:
        """Copy bytes of this process's memory: see `Copier`."""
        if allocations:
            upload(allocations, self._ring.shape, self._pin())
        return ()

    def _pin(self) -> PinnedRing:
        if self._pinned is None:
            self._pinned = PinnedRing(self._ring, self._runtime)
        return self._pinned


RING = Way(name="ring", is_measured=True, why_not=always_possible, open=RingCopier)
