"""Which allocations have all their bytes in this process's memory, while a load decodes."""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from shmload._devices.moves import Allocation, Move
from shmload._devices.ring_copier import RingCopier
from shmload._host.procfs import mappings
from shmload._loading.load import Load


def copy_arriving(
    allocations: Sequence[Allocation], load: Load, copier: RingCopier
) -> Sequence[Allocation]:
    """Copy allocations while a load decodes, each as soon as its bytes are there.

    It ends with the decode, also if that fails: `load.wait` tells.

    Args:
        allocations: to be copied.
        load: fills the segments that they lie in.
        copier: copies them.

    Returns:
        The allocations that are still to be copied: all, if the load has decoded before.
    """
    unfinished = load.holdings.unfinished_inodes()
    if not unfinished:
        return allocations
    spans = mappings(unfinished)
    arrivals = Arrivals(allocations, [(there.start, there.end) for there in spans])
    copier.copy(arrivals.ready)
    while (filled := load.filled.get()) is not None:
        complete = []
        for there in spans:
            if there.inode == filled.inode:
                base = there.start - there.offset
                complete += arrivals.note(base + filled.begin, base + filled.end)
        copier.copy(complete)
    return arrivals.rest


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
        moves = [(move, there) for there in allocations for move in there.moves]
        self._moves: list[tuple[Move, Allocation]] = sorted(moves, key=lambda each: each[0].address)
        # The furthest end so far, for each: tensors may overlap.
        self._reach = list(itertools.accumulate((move.end for move, _ in self._moves), max))
        for begin, end in missing:
            for there, nbytes in self._within(begin, end):
                self._missing[there] += nbytes
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
        for there, nbytes in self._within(begin, end):
            self._missing[there] -= nbytes
            if not self._missing[there]:
                complete.append(there)
        return complete

    @property
    def rest(self) -> list[Allocation]:
        """The allocations that still lack bytes."""
        return [there for there, nbytes in self._missing.items() if nbytes]

    def _within(self, begin: int, end: int) -> Iterable[tuple[Allocation, int]]:
        """Yield how many bytes of a range each move has, with the move's allocation."""
        first = bisect.bisect_right(self._reach, begin)
        for number in range(first, len(self._moves)):
            move, there = self._moves[number]
            if move.address >= end:
                return
            nbytes = min(end, move.end) - max(begin, move.address)
            if nbytes > 0:
                yield there, nbytes
