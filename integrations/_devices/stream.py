"""Copies to devices what workers fill a ring's slots with, while they fill the next ones.

Guarantee: the host holds no more of the weights than the ring has room for.
"""

import queue
from collections import deque
from collections.abc import Sequence

from shmload._decoding.ring import FilledSlot, Ring
from shmload._host.linux import Inode
from shmload._host.procfs import mappings
from shmload.integrations._devices.moves import Moves
from shmload.integrations._devices.pinned import PinnedRing
from shmload.integrations._devices.runtime import Event, Runtime, drain

_LANE = 0


class Stream:
    """Empties slots until there are no more.

    Args:
        moves: where the bytes go.
        hollow: the files that the modules' tensors seem to lie in, by the number that slots name.
        ring: whose slots are filled; stays the caller's.
        pinned: the same, registered; likewise.
    """

    def __init__(
        self, moves: Moves, hollow: Sequence[Inode], ring: Ring, pinned: PinnedRing
    ) -> None:
        self._moves = moves
        self._ring = ring
        self._pinned = pinned
        # Where each file's first byte would be, in each of its mappings.
        self._bases: list[list[int]] = [
            [mapping.start - mapping.offset for mapping in mappings({inode})] for inode in hollow
        ]
        self._busy: deque[tuple[list[Event], int]] = deque()

    def drain(self) -> None:
        """Copy all that comes; returns when all of it is on its devices.

        Whoever fills the slots says when there are no more, be it because of an error.
        """
        try:
            while (filled := self._next()) is not None:
                self._busy.append((self._send(filled), filled.offset))
        finally:
            drain(self._moves.runtimes, _LANE)

    def _next(self) -> FilledSlot | None:
        while self._busy:
            try:
                return self._ring.filled.get_nowait()
            except queue.Empty:
                self._retire()  # meanwhile the slot that was used first becomes free
        return self._ring.filled.get()

    def _retire(self) -> None:
        events, offset = self._busy.popleft()
        for event in events:
            event.wait()
        self._ring.give_back(offset)

    def _send(self, filled: FilledSlot) -> list[Event]:
        memory = self._pinned.slot(filled.offset)
        runtimes: dict[Runtime, None] = {}
        for base in self._bases[filled.shard]:
            first = base + filled.begin
            for move, low, high in self._moves.streamed_within(first, first + filled.nbytes):
                begin = move.offset + low - move.begin
                target = move.allocation.memory[begin : begin + high - low]
                runtime = move.allocation.runtime
                runtime.copy(target, memory[low - first : high - first], _LANE)
                runtimes[runtime] = None
        return [runtime.record(_LANE) for runtime in runtimes]
