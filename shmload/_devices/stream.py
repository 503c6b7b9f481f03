"""Copies the slots of a ring to devices while workers fill the next ones.

Guarantee: the host holds no more of the weights than fits the ring.
"""

import contextlib
import itertools
import queue
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from shmload._decoding.ring import FilledSlot, Ring
from shmload._devices.moves import Moves
from shmload._devices.pinned import PinnedRing
from shmload._host.descriptors import Inode
from shmload._host.procfs import mappings
from shmload._runtimes.runtime import Event, Runtime, drain, start

# A device can begin the copies of one lane while those of another end.
_LANES = 4


class Stream:
    """Copies filled slots until the last one.

    Args:
        moves: where the bytes go.
        hollow: the files that the modules' tensors seem to lie in, by the number that slots name.
        ring: that workers fill; stays the caller's.
        pinned: the same ring as devices see it; stays the caller's.
    """

    def __init__(
        self, moves: Moves, hollow: Sequence[Inode], ring: Ring, pinned: PinnedRing
    ) -> None:
        self._moves = moves
        self._ring = ring
        self._pinned = pinned
        # The address of each file's first byte, in each of its mappings.
        self._bases: list[list[int]] = [
            [mapping.start - mapping.offset for mapping in mappings({inode})] for inode in hollow
        ]
        self._busy: deque[tuple[list[Event], int]] = deque()
        self._lanes = itertools.cycle(range(_LANES))

    def drain(self) -> None:
        """Copy slots until the ring's last one; blocks until all bytes are on their devices.

        The load that fills the ring puts None behind its last slot, also when it fails.

        Raises:
            torch.OutOfMemoryError: a device is full.
            RuntimeError: a driver failed.
        """
        try:
            for runtime, lane in itertools.product(self._moves.runtimes, range(_LANES)):
                runtime.follow(lane)
            while (filled := self._next()) is not None:
                self._busy.append((self._send(filled), filled.offset))
        finally:
            with contextlib.ExitStack() as draining:  # each lane, also if draining another fails
                for lane in range(_LANES):
                    draining.callback(drain, self._moves.runtimes, lane)

    def _next(self) -> FilledSlot | None:
        while self._busy:
            try:
                return self._ring.filled.get_nowait()
            except queue.Empty:
                self._retire()  # no slot is filled yet: free the oldest one
        return self._ring.filled.get()

    def _retire(self) -> None:
        """Wait for the oldest copies and give their slot back."""
        events, offset = self._busy.popleft()
        for event in events:
            event.wait()
        self._ring.give_back(offset)

    def _send(self, filled: FilledSlot) -> list[Event]:
        """Start to copy a slot; returns the events after which it is free again."""
        return start(self._copies(filled), next(self._lanes))

    def _copies(self, filled: FilledSlot) -> Iterator[tuple[Runtime, torch.Tensor, torch.Tensor]]:
        memory = self._pinned.slot(filled.offset)
        for base in self._bases[filled.shard]:
            first = base + filled.begin
            for move, low, high in self._moves.streamed.within(first, first + filled.nbytes):
                target = move.target[low - move.address : high - move.address]
                yield move.runtime, target, memory[low - first : high - first]
