"""Copies bytes of this process to devices, through slots of page-locked memory.

Several cores fill one slot together, and the devices fetch from it while the next one is filled:

    cores    fill 1  fill 2  fill 3  fill 1 ...
    caller          start 1  start 2  start 3 ...
    bus              copy 1 ─────  copy 2 ─────  copy 3 ─────

One thread, the caller's, starts all copies. So nothing waits for the interpreter's lock but the few
calls that each slot takes.

Guarantee: a slot is filled again only when the devices have read it. After the context no copy is
under way, and no memory is locked. Sources are read by cores alone, and never by a device.
"""

import bisect
import contextlib
import ctypes
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import torch

from shmload._devices.moves import Move, Moves, Overlaps
from shmload._devices.page_locked import PageLocked
from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import mappings
from shmload._loading.load import Load
from shmload._runtimes.runtime import ALIGNMENT_NBYTES, Runtime

_SLOT_NBYTES = 32 << 20
# One is filled while the devices fetch from another, and one waits in between.
_SLOTS = 3
# Each core fills a part: eight of them reach the speed of the host's memory.
_PART_NBYTES = 4 << 20
_MAX_THREADS = 8


class Fetch(NamedTuple):
    """Consecutive bytes of a slot that a device fetches."""

    runtime: Runtime
    memory: torch.Tensor
    """An allocation of the device."""
    offset: int
    """Where the bytes go in it, in bytes."""
    begin: int
    """Where they begin in the slot, in bytes."""
    nbytes: int


class Fill(NamedTuple):
    """Consecutive bytes of this process that go into a slot."""

    begin: int
    """Where they go in the slot, in bytes."""
    address: int
    nbytes: int


class Batch:
    """What goes through a slot at a time."""

    def __init__(self) -> None:
        self.fills: list[Fill] = []
        self.fetches: list[Fetch] = []

    def next_begin(self, move: Move) -> int:
        """Return where a move's bytes go in the slot, in bytes.

        Neighbours in an allocation keep their distance, and are fetched together.
        """
        if not self.fetches:
            return 0
        last = self.fetches[-1]
        gap = move.offset - last.offset - last.nbytes
        is_near = last.memory is move.memory and 0 <= gap < ALIGNMENT_NBYTES
        return last.begin + last.nbytes + (gap if is_near else 0)

    def add(self, move: Move) -> None:
        """Add a move that fits into what is left of the slot."""
        begin = self.next_begin(move)
        self.fills.append(Fill(begin, move.address, move.nbytes))
        last = self.fetches[-1] if self.fetches else None
        if last and last.memory is move.memory and begin - last.begin == move.offset - last.offset:
            self.fetches[-1] = last._replace(nbytes=begin + move.nbytes - last.begin)
        else:
            self.fetches.append(Fetch(move.runtime, move.memory, move.offset, begin, move.nbytes))


def batches(moves: Iterable[Move], slot_nbytes: int) -> Iterator[Batch]:
    """Yield what goes through slots: every byte of the moves, once and in order.

    Args:
        moves: to be made.
        slot_nbytes: size of a slot, in bytes.
    """
    batch = Batch()
    for whole in moves:
        move = whole
        while move.nbytes:
            room = slot_nbytes - batch.next_begin(move)
            if room <= 0:
                yield batch
                batch = Batch()
                continue
            middle = min(move.end, move.address + room)
            batch.add(move.part(move.address, middle))
            move = move.part(middle, move.end)
    if batch.fills:
        yield batch


class Upload:
    """Slots, and the threads that fill them; a context that waits for the copies and ends all.

    Args:
        nbytes: about how much will be copied, in bytes.
        runtime: of the device that locks the slots; others may fetch from there too.
        max_nbytes: limit for all slots together, in bytes.
    """

    def __init__(self, nbytes: int, runtime: Runtime, max_nbytes: int | None = None) -> None:
        most = _SLOT_NBYTES if max_nbytes is None else min(_SLOT_NBYTES, max_nbytes // _SLOTS)
        pages = min(most // PAGE_NBYTES, -(-nbytes // PAGE_NBYTES))
        self._slot_nbytes = max(1, pages) * PAGE_NBYTES
        self._runtime = runtime
        self._pool = ThreadPoolExecutor(
            min(_MAX_THREADS, len(os.sched_getaffinity(0))), "shmload-upload"
        )
        self._slots: list[Future[PageLocked]] = []
        self._busy: deque[tuple[PageLocked, list[Any]]] = deque()
        self._runtimes: dict[Runtime, None] = {}
        # At once, beside each other: to make and to lock the pages takes some milliseconds a slot.
        needed = min(_SLOTS, -(-nbytes // self._slot_nbytes))
        self._free = deque(self._make_slot() for _ in range(needed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the copies, end the threads and release the slots; a second call is fine."""
        with contextlib.ExitStack() as closing:  # all, also if one fails
            for slot in self._slots:
                closing.callback(_close, slot)
            for runtime in self._runtimes:
                closing.callback(runtime.drain)
            closing.callback(self._pool.shutdown, cancel_futures=True)

    def copy(self, moves: Iterable[Move]) -> None:
        """Start to copy bytes; returns when they have been read, and may change.

        Args:
            moves: to any devices.

        Raises:
            torch.OutOfMemoryError: a device is full.
            RuntimeError: a driver failed.
        """
        before = None
        for batch in batches(moves, self._slot_nbytes):
            slot = self._take()
            address = slot.content.data_ptr()
            fills = [self._pool.submit(_fill, address, part) for part in _parts(batch.fills)]
            if before:  # the cores go on meanwhile
                self._start(*before)
            before = batch, slot, fills
        if before:
            self._start(*before)

    def _take(self) -> PageLocked:
        """Return a slot that all devices have read."""
        if not self._free and len(self._slots) < _SLOTS:
            self._free.append(self._make_slot())
        if self._free:
            return self._free.popleft().result()
        slot, events = self._busy.popleft()
        for event in events:
            event.synchronize()
        return slot

    def _make_slot(self) -> "Future[PageLocked]":
        slot = self._pool.submit(PageLocked, self._slot_nbytes, self._runtime)
        self._slots.append(slot)
        return slot

    def _start(self, batch: Batch, slot: PageLocked, fills: list["Future[None]"]) -> None:
        """Have the devices fetch from a slot when it is filled."""
        for fill in fills:
            fill.result()
        by_runtime: dict[Runtime, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for runtime, memory, offset, begin, nbytes in batch.fetches:
            pair = memory[offset : offset + nbytes], slot.content[begin : begin + nbytes]
            by_runtime.setdefault(runtime, []).append(pair)
        events = []
        for runtime, pairs in by_runtime.items():
            if runtime not in self._runtimes:
                self._runtimes[runtime] = None
                runtime.follow()
            runtime.copy(pairs)
            events.append(runtime.record())
        self._busy.append((slot, events))


def _parts(fills: Iterable[Fill]) -> Iterator[list[Fill]]:
    """Cut what goes into a slot into parts that a core fills, of one size."""
    part: list[Fill] = []
    room = _PART_NBYTES
    for whole in fills:
        begin, address, left = whole
        while left:
            nbytes = min(left, room)
            part.append(Fill(begin, address, nbytes))
            begin, address, left = begin + nbytes, address + nbytes, left - nbytes
            room -= nbytes
            if not room:
                yield part
                part, room = [], _PART_NBYTES
    if part:
        yield part


def _fill(slot: int, part: Iterable[Fill]) -> None:
    """Copy bytes into a slot, without the interpreter's lock."""
    for begin, address, nbytes in part:
        ctypes.memmove(slot + begin, address, nbytes)


def _close(slot: "Future[PageLocked]") -> None:
    if not slot.cancelled() and slot.exception() is None:
        slot.result().close()


def bring(moves: Moves, load: Load | None = None, max_nbytes: int | None = None) -> None:
    """Copy all bytes of moves, those that a load decodes as they come; blocks until all are there.

    Args:
        moves: to be made; the caller commits them.
        load: fills the segments that some of them lie in. If it is bounded, it gets its memory back
            behind the copy.
        max_nbytes: limit for the slots, in bytes.

    Raises:
        ShmloadError: the load failed.
        torch.OutOfMemoryError: a device is full.
        RuntimeError: a driver failed.
    """
    if not moves.moves:
        if load:
            load.wait()
        return
    spans = sorted(mappings({part.inode for _, part in load.holdings.unfinished()}) if load else ())
    starts = [there.start for there in spans]

    def comes_later(move: Move) -> bool:
        position = bisect.bisect_right(starts, move.address)
        return position > 0 and move.address < spans[position - 1].end

    nbytes = sum(move.nbytes for move in moves.moves)
    with Upload(nbytes, moves.runtimes[0], max_nbytes) as upload:
        upload.copy(itertools.filterfalse(comes_later, moves.moves))
        coming = Overlaps(filter(comes_later, moves.moves))
        while load and spans and (piece := load.filled.get()) is not None:
            for there in spans:
                if there.inode == piece.inode:
                    base = there.start - there.offset
                    upload.copy(coming.within(base + piece.begin, base + piece.end))
            load.give_back(piece)
        if load:
            load.wait()
