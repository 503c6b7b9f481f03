"""Copies bytes of this process to devices, through slots of page-locked memory.

Several cores fill one slot together, and the devices fetch from it while the next one is filled:

    cores    fill 1  fill 2  fill 3  fill 1 ...
    caller          start 1  start 2  start 3 ...
    bus              copy 1 ─────  copy 2 ─────  copy 3 ─────

One thread, the caller's, starts all copies. So nothing waits for the interpreter's lock but the few
calls that each slot takes.

Guarantee: a slot is filled again only when the devices have read it. After the context no copy is
under way, and no memory is locked. Sources are read by cores alone, and never by a device. `bring`
copies so what moves say, while a load still decodes some of it.
"""

import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

import torch

from shmload._devices.moves import Move, Moves, Overlaps
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES, is_modified
from shmload._host.procfs import Mappings, mappings_of
from shmload._loading.load import Load
from shmload._loading.trace import Phase, during
from shmload._runtimes.runtime import ALIGNMENT_NBYTES, Runtime

_SLOT_NBYTES = 32 << 20
# One is filled while the devices fetch from another, and one waits in between.
_SLOTS = 3
# Each core fills a share: eight of them reach the speed of the host's memory.
_SHARE_NBYTES = 4 << 20
_MAX_THREADS = 8
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class Files:
    """Files that are read in place of their mappings in this process.

    A mapping that is read gets entries in the page table, which take a quarter of the copy's time
    on the cores, and as much again, on a single one, when it is unmapped. A mapping that this
    process has written to is read itself: the file lacks what was written.

    Args:
        files: each with a descriptor, which stays the caller's.
    """

    def __init__(self, files: Iterable[tuple[Inode, int]] = ()) -> None:
        self._files = dict(files)
        found = mappings_of(self._files.keys())
        self._mappings = Mappings(there for there in found if not is_modified(there))

    def read(self, address: int, into: memoryview) -> int:
        """Read what a file has for an address; return how many bytes, 0 if it is of none."""
        there = self._mappings.at(address)
        if there is None or address + len(into) > there.end:
            return 0
        # 1 GiB takes a core 0.154 s so; from a fresh mapping 0.168 s, and 0.058 s more to unmap it
        # (2 cores, Linux 6.18, 2026-11-28, medians of 7). What cannot be read is copied from there.
        with contextlib.suppress(OSError):
            return os.preadv(self._files[there.inode], [into], there.offset + address - there.start)
        return 0


class Batch:
    """What goes through a slot at a time."""

    def __init__(self) -> None:
        self.shares: list[list[tuple[int, Move]]] = []
        """For each core in turn: the moves, each with where it goes in the slot, in bytes."""
        self.fetches: list[tuple[int, Move]] = []
        """The same moves, of which neighbours in an allocation are one."""
        self._room = 0  # in the last share

    def next_begin(self, move: Move) -> int:
        """Return where a move's bytes go in the slot: near to those of a neighbour."""
        if not self.fetches:
            return 0
        begin, last = self.fetches[-1]
        gap = move.offset - last.offset - last.nbytes
        is_near = last.memory is move.memory and 0 <= gap < ALIGNMENT_NBYTES
        return begin + last.nbytes + (gap if is_near else 0)

    def add(self, move: Move, room: int) -> int:
        """Add the beginning of a move; return how many bytes.

        Args:
            move: to be made.
            room: how many bytes may be added.
        """
        begin = self.next_begin(move)
        if not self._room:
            self.shares.append([])
            self._room = _SHARE_NBYTES
        added = move.cut(move.address, move.address + min(room, self._room, move.nbytes))
        self._room -= added.nbytes
        self.shares[-1].append((begin, added))
        first, last = self.fetches[-1] if self.fetches else (begin, None)
        if last and last.memory is move.memory and begin - first == move.offset - last.offset:
            self.fetches[-1] = first, last._replace(nbytes=begin + added.nbytes - first)
        else:
            self.fetches.append((begin, added))
        return added.nbytes


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
            if room > 0:
                move = move.cut(move.address + batch.add(move, room), move.end)
            else:
                yield batch
                batch = Batch()
    if batch.shares:
        yield batch


class PageLocked:
    """New memory, page-locked in the first of three ways that the driver allows; CUDA says pinned.

    It registers memory of this process, which is the system's again after `close`. Or torch gives
    some, which torch keeps in a cache. Or it stays ordinary memory, and copies from it are slower.

    Args:
        nbytes: how many bytes.
        runtime: of the device that fetches from there; others may too.
    """

    def __init__(self, nbytes: int, runtime: Runtime) -> None:
        self._runtime: Runtime | None = None
        self.content = _own_memory(nbytes)
        """Flat uint8."""
        if runtime.register(self.content.data_ptr(), nbytes, read_only=False):
            self._runtime = runtime
        elif (memory := runtime.page_locked(nbytes)) is not None:
            self.content = memory

    def close(self) -> None:
        """Release it; no copy from there may be under way. A second call does nothing."""
        runtime, self._runtime = self._runtime, None
        if runtime:
            runtime.unregister(self.content.data_ptr())


def _own_memory(nbytes: int) -> torch.Tensor:
    """Return new memory whose pages are there: a driver would make them one by one."""
    mapped = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with contextlib.suppress(OSError):  # a kernel without it
            mapped.madvise(advice)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class Upload:
    """Slots, and the threads that fill them; a context that waits for the copies and ends all.

    Args:
        nbytes: about how much will be copied, in bytes.
        runtime: of the device that locks the slots; others may fetch from there too.
        max_nbytes: limit for all slots together, in bytes.
        files: that bytes may be read from.
    """

    def __init__(
        self,
        nbytes: int,
        runtime: Runtime,
        max_nbytes: int | None = None,
        files: Files | None = None,
    ) -> None:
        most = _SLOT_NBYTES if max_nbytes is None else min(_SLOT_NBYTES, max_nbytes // _SLOTS)
        pages = min(most // PAGE_NBYTES, -(-nbytes // PAGE_NBYTES))
        self._slot_nbytes = max(1, pages) * PAGE_NBYTES
        self._runtime = runtime
        self._files = files or Files()
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, "shmload-upload")
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

    def is_small_for(self, nbytes: int) -> bool:
        """Tell whether so many bytes would have larger slots."""
        return self._slot_nbytes < min(nbytes, _SLOT_NBYTES)

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
            moves: to any devices. After an error no byte of them is read any more.

        Raises:
            torch.OutOfMemoryError: a device is full.
            RuntimeError: a driver failed.
        """
        fills: list[Future[None]] = []
        try:
            before = None
            for batch in batches(moves, self._slot_nbytes):
                slot = self._take()
                started = len(fills)
                fills.extend(
                    self._pool.submit(_fill, slot.content, share, self._files)
                    for share in batch.shares
                )
                if before:  # the cores go on meanwhile
                    self._start(*before)
                before = batch, slot, fills[started:]
            if before:
                self._start(*before)
        except BaseException:
            self._take_back(fills)
            raise

    def _take_back(self, fills: Iterable["Future[None]"]) -> None:
        """Have all slots free after an error: none is filled, and no device reads from one."""
        wait(fills)
        for runtime in self._runtimes:
            runtime.drain()
        self._slots = [slot for slot in self._slots if slot.exception() is None]
        self._busy.clear()
        self._free = deque(self._slots)

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
        by_runtime: dict[Runtime, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for begin, move in batch.fetches:
            pair = move.target, slot.content[begin : begin + move.nbytes]
            by_runtime.setdefault(move.runtime, []).append(pair)
        events = []
        with during(Phase.COPY, ", ".join(str(runtime.device) for runtime in by_runtime)):
            for fill in fills:
                fill.result()
            for runtime, pairs in by_runtime.items():
                if runtime not in self._runtimes:
                    self._runtimes[runtime] = None
                    runtime.follow()
                runtime.copy(pairs)
                events.append(runtime.record())
        self._busy.append((slot, events))


def _fill(slot: torch.Tensor, share: Iterable[tuple[int, Move]], files: Files) -> None:
    """Bring bytes into a slot, without the interpreter's lock."""
    content = slot.numpy().data
    for begin, move in share:
        done = files.read(move.address, content[begin : begin + move.nbytes])
        if done < move.nbytes:
            address = slot.data_ptr() + begin + done
            ctypes.memmove(address, move.address + done, move.nbytes - done)


def _close(slot: "Future[PageLocked]") -> None:
    if not slot.cancelled() and slot.exception() is None:
        slot.result().close()


def bring(
    moves: Moves,
    load: Load | None = None,
    max_nbytes: int | None = None,
    files: Iterable[tuple[Inode, int]] = (),
) -> None:
    """Copy the bytes of all moves, and wait until they are there; copy decoded pieces as they come.

    Args:
        moves: to be made; the caller commits them.
        load: fills the segments that some of them lie in. If it is bounded, it gets its memory back
            behind the copy.
        max_nbytes: limit for the slots, in bytes.
        files: the files that the bytes lie in, as far as they are known, as for `Files`.

    Raises:
        ShmloadError: the load failed.
        torch.OutOfMemoryError: a device is full.
        RuntimeError: a driver failed.
    """
    if not moves.moves:
        if load:
            load.wait()
        return
    filling = mappings_of({part.inode for _, part in load.holdings.unfinished()} if load else ())
    early = [move for move in moves.moves if not filling.at(move.address)]
    nbytes = sum(move.nbytes for move in moves.moves)
    with Upload(nbytes, moves.runtimes[0], max_nbytes, Files(files)) as upload:
        upload.copy(early)
        coming = Overlaps(move for move in moves.moves if filling.at(move.address))
        while load and filling and (piece := load.next_filled()) is not None:
            for there in filling:
                if there.inode == piece.part.inode:
                    base = there.start - there.offset
                    upload.copy(coming.within(base + piece.begin, base + piece.end))
            load.give_back(piece)
        if load:
            load.wait()
