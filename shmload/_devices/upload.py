"""Copies the tensors of modules from this process's memory to devices, at the speed of the bus.

Threads fill the slots of a ring, and each device fetches from a slot while the next one is filled.

Guarantee: when `upload` returns, all bytes are on their devices; when it raises, no copy is under
way. The modules get their tensors only by `Moves.commit`.
"""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from shmload._decoding.ring import RingShape, ring_shape
from shmload._devices.moves import Allocation
from shmload._devices.pinned import PinnedRing
from shmload._runtimes.runtime import Event, Runtime, drain, start

# With an H200 and 16 cores, 8 threads with slots of 8 MiB bring 4.5 GB at 13 GB/s, 16 with slots of
# 4 MiB at 8: each copy takes the interpreter's lock, and more threads wait for it longer.
_MAX_THREADS = 8
_SLOT_NBYTES = 8 << 20
# One being filled, one being copied.
_SLOTS_OF_A_THREAD = 2


class Extent(NamedTuple):
    """Consecutive bytes of one allocation that go through a slot."""

    allocation: Allocation
    begin: int
    """Offset of the first byte in the allocation, in bytes."""
    end: int
    """Offset behind the last byte in the allocation, in bytes."""
    offset: int
    """Offset of the first byte in the slot, in bytes."""


def filler_count() -> int:
    """Return how many threads fill a ring."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def upload_shape(max_nbytes: int | None = None) -> RingShape:
    """Return the shape of a ring that only this process's threads fill.

    Args:
        max_nbytes: limit for the whole ring, in bytes; None for the fastest shape.

    Raises:
        ArgumentError: the limit is below two pages.
    """
    return ring_shape(filler_count(), max_nbytes, _SLOT_NBYTES, _SLOTS_OF_A_THREAD)


def upload(allocations: Sequence[Allocation], shape: RingShape, ring: PinnedRing) -> None:
    """Copy the bytes of allocations through a ring; blocks until all are on their devices.

    Args:
        allocations: their bytes are in this process's memory.
        shape: of the ring.
        ring: stays the caller's; all its slots are free.

    Raises:
        torch.OutOfMemoryError: a device is full.
        RuntimeError: a driver failed.
    """
    nbytes = sum(there.used_nbytes for there in allocations)
    if nbytes:
        needed = -(-nbytes // shape.slot_nbytes)
        threads = min(filler_count(), shape.slots, needed)
        offsets = [number * shape.slot_nbytes for number in range(shape.slots)]
        slots = [offsets[lane::threads][:_SLOTS_OF_A_THREAD] for lane in range(threads)]
        _Upload(allocations, shape.slot_nbytes, ring, slots).run()


def batches(allocations: Sequence[Allocation], slot_nbytes: int) -> Iterator[list[Extent]]:
    """Yield the extents that go through a slot together: every used byte, once and in order.

    Args:
        allocations: to copy.
        slot_nbytes: size of a slot, in bytes.
    """
    batch: list[Extent] = []
    used = 0
    for allocation in allocations:
        begin = 0
        while begin < allocation.used_nbytes:
            if used == slot_nbytes:
                yield batch
                batch, used = [], 0
            end = min(allocation.used_nbytes, begin + slot_nbytes - used)
            batch.append(Extent(allocation, begin, end, used))
            used += end - begin
            begin = end
    if batch:
        yield batch


class _Upload:
    """One call of `upload`: each thread has its own slots and lane, and takes the next batch.

    Args:
        allocations: to copy.
        slot_nbytes: size of the ring's slots, in bytes.
        ring: stays the caller's.
        slots: of each lane, as offsets in the ring, in bytes.
    """

    def __init__(
        self,
        allocations: Sequence[Allocation],
        slot_nbytes: int,
        ring: PinnedRing,
        slots: Sequence[Sequence[int]],
    ) -> None:
        self._batches = batches(allocations, slot_nbytes)
        self._runtimes = {there.runtime for there in allocations}
        self._ring = ring
        self._slots = slots
        self._lock = threading.Lock()
        self._is_given_up = False
        # Threads do not inherit this mode, and tensors made in it may be written to only in it.
        self._is_inference = torch.is_inference_mode_enabled()

    def run(self) -> None:
        for runtime in self._runtimes:
            for lane in range(len(self._slots)):
                runtime.follow(lane)
        with ThreadPoolExecutor(len(self._slots), "shmload-upload") as executor:
            try:
                list(executor.map(self._start, range(len(self._slots))))
            except BaseException:
                self._is_given_up = True
                raise

    def _start(self, lane: int) -> None:
        try:
            with torch.inference_mode(self._is_inference), contextlib.ExitStack() as lanes:
                for runtime in self._runtimes:
                    lanes.enter_context(runtime.using(lane))
                self._work(lane)
        except BaseException:
            self._is_given_up = True  # the other threads stop at their next batch
            raise

    def _work(self, lane: int) -> None:
        busy: deque[list[Event]] = deque()
        try:
            for offset in itertools.cycle(self._slots[lane]):
                batch = self._next_batch()
                if batch is None:
                    return
                if len(busy) == len(self._slots[lane]):
                    for event in busy.popleft():
                        event.wait()
                busy.append(start(self._copies(batch, offset), lane))
        finally:
            drain(self._runtimes, lane)

    def _next_batch(self) -> list[Extent] | None:
        with self._lock:
            return None if self._is_given_up else next(self._batches, None)

    def _copies(
        self, batch: list[Extent], offset: int
    ) -> Iterator[tuple[Runtime, torch.Tensor, torch.Tensor]]:
        """Fill a slot; yields the copies from it, each as soon as its bytes are there."""
        slot = self._ring.slot(offset)
        for extent in batch:
            self._fill(offset + extent.offset, extent)
            source = slot[extent.offset : extent.offset + extent.end - extent.begin]
            there = extent.allocation
            yield there.runtime, there.memory[extent.begin : extent.end], source

    def _fill(self, offset: int, extent: Extent) -> None:
        """Copy an extent's bytes into the ring.

        Args:
            offset: of its first byte in the ring, in bytes.
            extent: bytes of its allocation; gaps between tensors are not copied.
        """
        for move in extent.allocation.moves:
            low = max(extent.begin, move.offset)
            high = min(extent.end, move.offset + move.nbytes)
            if low < high:
                address = move.address + low - move.offset
                self._ring.put(offset + low - extent.begin, address, high - low)
