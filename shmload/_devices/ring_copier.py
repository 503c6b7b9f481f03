"""Threads copy bytes into a ring of pinned memory, and devices fetch them from there.

It works for all bytes and on every device: where the driver pins nothing, copies are slower. While
a load decodes, an allocation is copied as soon as it has all its bytes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

from shmload._decoding.ring import Ring
from shmload._devices.moves import Allocation, Moves, Overlaps
from shmload._devices.pinned import PinnedRing
from shmload._devices.stream import Stream
from shmload._devices.upload import upload
from shmload._host.descriptors import Inode
from shmload._host.procfs import mappings
from shmload._loading.load import Load
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

    def copy_arriving(self, allocations: Sequence[Allocation], load: Load) -> Sequence[Allocation]:
        """Copy allocations while a load decodes, each as soon as its bytes are there.

        It ends with the decode, also if that fails: `load.wait` tells.

        Args:
            allocations: to be copied.
            load: fills the segments that they lie in.

        Returns:
            The allocations that are still to be copied: all, if the load has decoded before.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as `copy`.
        """
        unfinished = {part.inode for _, part in load.holdings.unfinished()}
        if not unfinished:
            return allocations
        spans = mappings(unfinished)
        arrivals = Arrivals(allocations, [(there.start, there.end) for there in spans])
        self.copy(arrivals.ready)
        while (filled := load.filled.get()) is not None:
            complete = []
            for there in spans:
                if there.inode == filled.inode:
                    base = there.start - there.offset
                    complete += arrivals.note(base + filled.begin, base + filled.end)
            self.copy(complete)
        return arrivals.rest

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


class Arrivals:
    """Allocations whose bytes arrive one after the other.

    Args:
        allocations: all that are to be copied.
        missing: the ranges of addresses whose bytes come later: the first address, and the one
            behind the last.
    """

    def __init__(
        self, allocations: Sequence[Allocation], missing: Iterable[tuple[int, int]]
    ) -> None:
        self._missing: Counter[Allocation] = Counter()
        self._overlaps = Overlaps(move for there in allocations for move in there.moves)
        self._allocation_of = {id(move): there for there in allocations for move in there.moves}
        for begin, end in missing:
            for move, low, high in self._overlaps.within(begin, end):
                self._missing[self._allocation_of[id(move)]] += high - low
        self._arrived: set[tuple[int, int]] = set()
        self.ready = [there for there in allocations if not self._missing[there]]
        """The allocations that have their bytes from the beginning."""

    def note(self, begin: int, end: int) -> list[Allocation]:
        """Note that bytes have come; returns the allocations that are complete by them.

        Args:
            begin: address of the first byte. No byte may come in two different ranges.
            end: address behind the last one.
        """
        if (begin, end) in self._arrived:
            return []
        self._arrived.add((begin, end))
        complete = []
        for move, low, high in self._overlaps.within(begin, end):
            there = self._allocation_of[id(move)]
            self._missing[there] -= high - low
            if not self._missing[there]:
                complete.append(there)
        return complete

    @property
    def rest(self) -> list[Allocation]:
        """The allocations that still lack bytes."""
        return [there for there, nbytes in self._missing.items() if nbytes]
