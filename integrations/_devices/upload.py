"""Copies the tensors of modules from this process's memory to devices, at the speed of the bus.

Threads copy bytes into the slots of a ring, and each device fetches from there while the next slot
is filled.

Guarantee: when it returns all bytes are on their devices; when it raises, no copy is under way any
more. The modules get their tensors only by `Moves.commit`.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from shmload._decoding.ring import RingShape
from shmload.integrations._devices.moves import Allocation
from shmload.integrations._devices.pinned import PinnedRing
from shmload.integrations._devices.runtime import Event, Runtime, drain

# More threads copy no faster than memory does.
_MAX_THREADS = 8


class Batch(NamedTuple):
    """Bytes of one allocation that go through a slot."""

    allocation: Allocation
    begin: int
    """In the allocation, in bytes."""
    end: int
    offset: int
    """In the slot, in bytes."""


def filler_count() -> int:
    """Return how many threads fill a ring."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def upload(allocations: Sequence[Allocation], shape: RingShape, ring: PinnedRing) -> None:
    """Fill allocations through a ring; blocks until it is done.

    Args:
        allocations: whose bytes are in this process's memory.
        shape: of the ring.
        ring: of which nothing is in use; stays the caller's.
    """
    if allocations:
        threads = min(filler_count(), shape.slots)
        offsets = [number * shape.slot_nbytes for number in range(shape.slots)]
        shares = [offsets[lane::threads] for lane in range(threads)]
        _Staging(allocations, shape.slot_nbytes, ring, shares).run()


def batch(allocations: Sequence[Allocation], slot_nbytes: int) -> Iterator[list[Batch]]:
    """Yield what goes through a slot together: every byte that is wanted, once and in order.

    Args:
        allocations: what is to be filled.
        slot_nbytes: size of a slot.
    """
    together: list[Batch] = []
    used = 0
    for allocation in allocations:
        begin = 0
        while begin < allocation.used_nbytes:
            if used == slot_nbytes:
                yield together
                together, used = [], 0
            end = min(allocation.used_nbytes, begin + slot_nbytes - used)
            together.append(Batch(allocation, begin, end, used))
            used += end - begin
            begin = end
    if together:
        yield together


class _Staging:
    """One run of `upload`: threads, each with slots of its own, share the batches.

    Args:
        allocations: what is to be filled.
        slot_nbytes: size of the ring's slots.
        ring: stays the caller's.
        shares: the slots of each thread, as offsets in the ring, in bytes.
    """

    def __init__(
        self,
        allocations: Sequence[Allocation],
        slot_nbytes: int,
        ring: PinnedRing,
        shares: Sequence[Sequence[int]],
    ) -> None:
        self._batches = batch(allocations, slot_nbytes)
        self._runtimes = {there.runtime for there in allocations}
        self._ring = ring
        self._shares = shares
        self._lock = threading.Lock()
        self._is_given_up = False
        # Threads do not inherit it, and only in it may tensors be written to that were made in it.
        self._is_inference = torch.is_inference_mode_enabled()

    def run(self) -> None:
        with ThreadPoolExecutor(len(self._shares), "shmload-upload") as executor:
            try:
                list(executor.map(self._start, range(len(self._shares))))
            except BaseException:
                self._is_given_up = True
                raise

    def _start(self, lane: int) -> None:
        try:
            with torch.inference_mode(self._is_inference):
                self._work(lane)
        except BaseException:
            self._is_given_up = True  # the other threads need not go on
            raise

    def _work(self, lane: int) -> None:
        busy: deque[list[Event]] = deque()
        try:
            for offset in itertools.cycle(self._shares[lane]):
                together = self._next_batch()
                if together is None:
                    return
                if len(busy) == len(self._shares[lane]):
                    _wait(busy.popleft())
                busy.append(self._send(together, offset, lane))
        finally:
            drain(self._runtimes, lane)

    def _next_batch(self) -> list[Batch] | None:
        with self._lock:
            return None if self._is_given_up else next(self._batches, None)

    def _send(self, together: list[Batch], offset: int, lane: int) -> list[Event]:
        """Stage bytes, begin to copy them, and return what tells that the slot is free again."""
        slot = self._ring.slot(offset)
        runtimes: dict[Runtime, None] = {}
        for part in together:
            self._stage(part, offset + part.offset)
            source = slot[part.offset : part.offset + part.end - part.begin]
            runtime = part.allocation.runtime
            runtime.copy(part.allocation.memory[part.begin : part.end], source, lane)
            runtimes[runtime] = None
        return [runtime.record(lane) for runtime in runtimes]

    def _stage(self, part: Batch, offset: int) -> None:
        for move in part.allocation.moves:
            low = max(part.begin, move.offset)
            high = min(part.end, move.offset + move.nbytes)
            if low < high:
                self._ring.put(
                    offset + low - part.begin, move.begin + low - move.offset, high - low
                )


def _wait(events: list[Event]) -> None:
    while events:
        events.pop().wait()
