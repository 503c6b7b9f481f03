"""Reads the parts of a shard that a piece needs, in order: when they are needed, or ahead.

Guarantee: what is read is complete, or an error says where the shard ends or what the kernel says.
At most `MAX_READERS` reads are under way, in as many threads; their buffers are all that it takes.
"""

import errno
import itertools
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shmload._checkpoints.remote import (
    FetchError,
    ObjectChanged,
    ObjectMissing,
    RemoteObject,
    pointed_object,
)
from shmload._host.reading import (
    MAX_READERS,
    READ_NBYTES,
    Reading,
    choose_reading,
)
from shmload._segments.pieces import Run
from shmload.workers.messages import Reason

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


_PAGE_NBYTES = mmap.PAGESIZE
REQUESTS = 4
"""Requests to a server that one worker makes at a time."""
RANGE_NBYTES = 8 << 20
"""Size of the largest range that one requests, in bytes."""
# To read a gap of this size takes less time than another request.
_MOST_GAP_NBYTES = 256 << 10
# In bytes a second of a core. On a virtual machine whose host gives it each page at its first use,
# the kernel copies 0.8 GB/s from pages that the disk has just filled, and 3 to 18 GB/s from others.
# A process that loads 5.5 GB took 7.5 s there through the page cache, and takes 5.0 s past it
# (2 cores, n=5, 2026-11-29). The next load has nothing in memory then.
_SLOW_COPY = 1.5e9
_ENOUGH_READS = 16
# While it waits, a worker says that it lives, and finds out whether its coordinator does.
_SIGN_OF_LIFE_S = 1.0

Views = Generator[memoryview, None, None]
Runs = Sequence[Run]
Readable = Reading | RemoteObject
"""What a shard is read from: its file, or the object that this points to."""


class FillError(Exception):
    """A piece cannot be filled.

    Attributes:
        reason: the kind of failure.
        offset: where the shard ends, in bytes, if it ends early.
    """

    def __init__(self, reason: Reason, detail: str, offset: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.offset = offset


def join(runs: Sequence[Run], is_one_read: Callable[[Run, Run, Run], bool]) -> Iterator[Runs]:
    """Join runs that follow one another in the shard; one read gets them, with what lies between.

    Args:
        runs: in the order in which they are read.
        is_one_read: tells of the first and the last joined run, and the next, whether that joins.
    """
    first = 0
    for number in range(1, len(runs) + 1):
        if number == len(runs) or not is_one_read(runs[first], runs[number - 1], runs[number]):
            yield runs[first:number]
            first = number


def read_in_order(
    groups: Iterator[Runs],
    begin: Callable[[Runs], "Future[Any]"],
    most: int,
    wait_for: Callable[["Future[Any]"], memoryview] = lambda future: future.result(),
) -> Views:
    """Yield the bytes of each run, in order, while later groups are read.

    Close the iterator if it is not used up: it waits for the reads that are under way.

    Args:
        groups: what one read each gets, as `join` returns it.
        begin: begins to read a group.
        most: how many reads are under way at most.
        wait_for: returns the bytes of a group from its `begin`.
    """
    under_way: deque[tuple[Runs, Future[Any]]] = deque()

    def go_on() -> None:
        while len(under_way) < most and (group := next(groups, None)):
            under_way.append((group, begin(group)))

    try:
        go_on()
        while under_way:
            group, future = under_way[0]
            content = wait_for(future)
            under_way.popleft()
            go_on()
            for run in group:
                begin_of_run = run.source_offset - group[0].source_offset
                yield content[begin_of_run : begin_of_run + run.source_nbytes]
    finally:
        for _, future in under_way:
            if not future.cancel():
                future.exception()  # waits: a buffer must not be written to afterwards


def examine(fd: int, workers: int) -> Readable:
    """Choose how one of some workers reads a shard.

    Args:
        fd: descriptor of the shard.
        workers: number of workers that read it at the same time.

    Returns:
        What is read: the file, which is to be closed, or the object that it points to.
    """
    return pointed_object(fd) or choose_reading(fd, workers)


class Reader:
    """Reads through buffers that it owns, until `close`; not for several threads."""

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []
        self._threads: ThreadPoolExecutor | None = None
        # How many more have copied slowly from the page cache than quickly.
        self._slow_reads = 0

    def close(self) -> None:
        """End the threads; a second call is fine."""
        if self._threads:
            self._threads.shutdown()
            self._threads = None

    def read(
        self,
        shard: Readable,
        runs: Runs,
        wait_longer: Callable[[], None] = lambda: None,
    ) -> Views:
        """Yield the bytes of each run, in order; each is valid until the next is asked for.

        Close the iterator if it is not used up: it waits for the reads that are under way.

        Args:
            shard: from `examine`.
            runs: none larger than `READ_NBYTES` there.
            wait_longer: called now and then while a server keeps the worker waiting.

        Raises:
            FillError: the shard ends early or was replaced, or cannot be read.
        """
        if isinstance(shard, RemoteObject):
            return self._read_ranges(shard, runs, wait_longer)
        if shard.readers:
            return self._read_ahead(shard, runs)
        return self._read_now(shard, runs)

    def _read_now(self, file: Reading, runs: Runs) -> Views:
        self._allow_buffers(1)
        for run in runs:
            view = self._buffers[0][: run.source_nbytes]
            _read_fully(file.fd, view, run.source_offset, 0)
            yield view

    def _read_ahead(self, file: Reading, runs: Runs) -> Views:
        depth = min(file.readers, MAX_READERS)
        self._allow_buffers(depth + 1)  # one is in use while the others are filled
        threads = self._start_threads()
        buffers = itertools.cycle(self._buffers[: depth + 1])
        return read_in_order(
            join(runs, _is_one_read),
            lambda group: threads.submit(self._fetch, file, next(buffers), group),
            depth,
        )

    def _fetch(self, file: Reading, buffer: memoryview, group: Runs) -> memoryview:
        """Read a group to where its page begins in the buffer; return where it lies."""
        if file.is_past_cache or self._slow_reads >= _ENOUGH_READS:
            return _read_group(file, buffer, group)
        began_s = time.thread_time()
        content = _read_group(file._replace(direct_fd=None), buffer, group)
        took_s = time.thread_time() - began_s
        if len(content) > READ_NBYTES // 2:
            is_slow = len(content) < _SLOW_COPY * took_s
            self._slow_reads = max(0, self._slow_reads + (1 if is_slow else -1))
        return content

    def _read_ranges(
        self, pointed: RemoteObject, runs: Runs, wait_longer: Callable[[], None]
    ) -> Views:
        # Not at the top: most shards are files.
        from concurrent.futures import wait

        from shmload._checkpoints.objects import fetch

        def wait_for(future: "Future[Any]") -> memoryview:
            while not wait([future], _SIGN_OF_LIFE_S).done:
                wait_longer()
            return memoryview(future.result())

        threads = self._start_threads()
        groups = join(runs, is_one_range)
        try:
            yield from read_in_order(
                groups,
                lambda group: threads.submit(
                    fetch, pointed, group[0].source_offset, group[-1].source_end
                ),
                REQUESTS,
                wait_for,
            )
        except (ObjectChanged, ObjectMissing) as exc:
            raise FillError(Reason.CHANGED, str(exc)) from exc
        except FetchError as exc:
            raise FillError(Reason.READ_ERROR, str(exc)) from exc

    def _allow_buffers(self, count: int) -> None:
        """Have so many buffers; they begin on a page, as O_DIRECT needs it."""
        while len(self._buffers) < count:
            # A group need not begin or end on a page, and may exceed `READ_NBYTES` by a page.
            self._buffers.append(memoryview(mmap.mmap(-1, READ_NBYTES + 2 * _PAGE_NBYTES)))

    def _start_threads(self) -> "ThreadPoolExecutor":
        if self._threads is None:
            # Not at the top: it imports logging, and most sources are in the page cache.
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(MAX_READERS, "shmload-reader")
        return self._threads


def _is_one_read(first: Run, last: Run, run: Run) -> bool:
    """Tell whether a run is read with those before it: both begin in one block of the file."""
    is_near = run.source_offset // READ_NBYTES == first.source_offset // READ_NBYTES
    # The last element may cross the end of the block: it is read whole.
    fits = run.source_end - first.source_offset <= READ_NBYTES + _PAGE_NBYTES
    return run.source_offset >= last.source_end and is_near and fits


def is_one_range(first: Run, last: Run, run: Run) -> bool:
    """Tell whether a run of an object is requested with those before it: the gap is small."""
    is_near = 0 <= run.source_offset - last.source_end <= _MOST_GAP_NBYTES
    return is_near and run.source_end - first.source_offset <= RANGE_NBYTES


def _read_group(file: Reading, buffer: memoryview, group: Runs) -> memoryview:
    """Read a group to where its page begins in the buffer; return where it lies."""
    first, end = group[0].source_offset, group[-1].source_end
    begin = first // _PAGE_NBYTES * _PAGE_NBYTES
    done = 0
    if file.direct_fd is not None:
        whole = buffer[: -(-end // _PAGE_NBYTES) * _PAGE_NBYTES - begin]
        try:
            done = os.preadv(file.direct_fd, [whole], begin)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # its offsets must be multiples of more than a page
                raise _read_error(exc) from exc
    # What is left, at the end of the file, is no multiple of a page.
    _read_fully(file.fd, buffer[: end - begin], begin, done)
    return buffer[first - begin : end - begin]


def _read_fully(fd: int, buffer: memoryview, offset: int, done: int) -> None:
    """Read a whole buffer from an offset, of which `done` bytes are there."""
    while done < len(buffer):
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as exc:
            raise _read_error(exc) from exc
        if got == 0:
            raise FillError(Reason.TRUNCATED, "the file ends early", offset + done)
        done += got


def _read_error(exc: OSError) -> FillError:
    return FillError(Reason.READ_ERROR, os.strerror(exc.errno or errno.EIO))
