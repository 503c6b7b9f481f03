"""Reads the parts of a shard that a piece needs, in order: when they are needed, or ahead.

Guarantee: what is read is complete, or an error says where the shard ends or what the kernel says.
At most `MAX_READERS` reads are under way, in as many threads; their buffers are all that it takes.
"""

import errno
import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shmload._checkpoints.remote import (
    FetchError,
    ObjectChanged,
    ObjectMissing,
    RemoteObject,
    pointed_object,
)
from shmload._host.reading import (
    MAX_READERS,
    PLAIN,
    READ_NBYTES,
    Reading,
    choose_reading,
    open_direct,
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
# While it waits, a worker says that it lives, and finds out whether its coordinator does.
_SIGN_OF_LIFE_S = 1.0

Views = Generator[memoryview, None, None]


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


class Group(NamedTuple):
    """Runs that one read gets, with what lies between them."""

    begin: int
    end: int
    runs: Sequence[Run]


def join(runs: Sequence[Run], is_one_read: Callable[[Run, int, Run], bool]) -> Iterator[Group]:
    """Join runs that follow one another in the shard into groups.

    Args:
        runs: in the order in which they are read.
        is_one_read: tells of a group's first run, its end, and the next run, whether that joins.
    """
    first = 0
    for number in range(1, len(runs) + 1):
        last = runs[number - 1]
        end = last.source_offset + last.source_nbytes
        if number == len(runs) or not is_one_read(runs[first], end, runs[number]):
            yield Group(runs[first].source_offset, end, runs[first:number])
            first = number


def read_in_order(
    groups: Iterator[Group],
    begin: Callable[[Group], "Future[Any]"],
    most: int,
    wait_for: Callable[["Future[Any]"], memoryview] = lambda future: future.result(),
) -> Views:
    """Yield the bytes of each run, in order, while later groups are read.

    Close the iterator if it is not used up: it waits for the reads that are under way.

    Args:
        groups: what is read.
        begin: begins to read a group.
        most: how many reads are under way at most.
        wait_for: returns the bytes of a group from its `begin`.
    """
    under_way: deque[tuple[Group, Future[Any]]] = deque()

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
            for run in group.runs:
                begin_of_run = run.source_offset - group.begin
                yield content[begin_of_run : begin_of_run + run.source_nbytes]
    finally:
        for _, future in under_way:
            if not future.cancel():
                future.exception()  # waits: a buffer must not be written to afterwards


class Source(NamedTuple):
    """A shard to read."""

    fd: int
    """Stays with the one who opened it."""
    reading: Reading = PLAIN
    direct_fd: int | None = None
    """The same file, opened for reads past the page cache; None to read through it."""
    pointed: RemoteObject | None = None
    """The object to read in place of the file, which only points to it."""

    def close_direct(self) -> None:
        """Close the second descriptor, if there is one."""
        if self.direct_fd is not None:
            os.close(self.direct_fd)


def examine_source(fd: int, workers: int) -> Source:
    """Choose how one of some workers reads a shard.

    Args:
        fd: descriptor of the shard.
        workers: number of workers that read it at the same time.

    Returns:
        The shard; `close_direct` it in the end.
    """
    pointed = pointed_object(fd)
    if pointed:
        return Source(fd, pointed=pointed)
    reading = choose_reading(fd, workers)
    return Source(fd, reading, open_direct(fd) if reading.is_direct else None)


class Reader:
    """Reads through buffers that it owns, until `close`; not for several threads."""

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads; a second call is fine."""
        if self._threads:
            self._threads.shutdown()
            self._threads = None

    def read(
        self,
        source: Source,
        runs: Sequence[Run],
        wait_longer: Callable[[], None] = lambda: None,
    ) -> Views:
        """Yield the bytes of each run, in order; each is valid until the next is asked for.

        Close the iterator if it is not used up: it waits for the reads that are under way.

        Args:
            source: the shard.
            runs: none larger than `READ_NBYTES` there.
            wait_longer: called now and then while a server keeps the worker waiting.

        Raises:
            FillError: the shard ends early or was replaced, or cannot be read.
        """
        if source.pointed:
            return self._read_ranges(source.pointed, runs, wait_longer)
        if source.reading.readers:
            return self._read_ahead(source, runs)
        return self._read_now(source, runs)

    def _read_now(self, source: Source, runs: Sequence[Run]) -> Views:
        self._allow_buffers(1)
        for run in runs:
            view = self._buffers[0][: run.source_nbytes]
            _read_fully(source.fd, view, run.source_offset, 0)
            yield view

    def _read_ahead(self, source: Source, runs: Sequence[Run]) -> Views:
        depth = min(source.reading.readers, MAX_READERS)
        self._allow_buffers(depth + 1)  # one is in use while the others are filled
        threads = self._start_threads()
        buffers = itertools.cycle(self._buffers[: depth + 1])
        return read_in_order(
            join(runs, _is_one_read),
            lambda group: threads.submit(_fetch, source, next(buffers), group),
            depth,
        )

    def _read_ranges(
        self, pointed: RemoteObject, runs: Sequence[Run], wait_longer: Callable[[], None]
    ) -> Views:
        # Not at the top: most shards are files.
        from shmload._checkpoints.objects import fetch

        def wait_for(future: "Future[Any]") -> memoryview:
            while True:
                try:
                    return memoryview(future.result(_SIGN_OF_LIFE_S))
                except TimeoutError:
                    if future.done():
                        raise
                    wait_longer()

        threads = self._start_threads()
        groups = join(runs, is_one_range)
        try:
            yield from read_in_order(
                groups,
                lambda group: threads.submit(fetch, pointed, group.begin, group.end),
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


def _is_one_read(first: Run, end: int, run: Run) -> bool:
    """Tell whether a run is read with those before it: both begin in one block of the file."""
    is_near = run.source_offset // READ_NBYTES == first.source_offset // READ_NBYTES
    # The last element may cross the end of the block: it is read whole.
    fits = _nbytes_of(first, run) <= READ_NBYTES + _PAGE_NBYTES
    return run.source_offset >= end and is_near and fits


def is_one_range(first: Run, end: int, run: Run) -> bool:
    """Tell whether a run of an object is requested with those before it: the gap is small."""
    is_near = end <= run.source_offset <= end + _MOST_GAP_NBYTES
    return is_near and _nbytes_of(first, run) <= RANGE_NBYTES


def _nbytes_of(first: Run, last: Run) -> int:
    return last.source_offset + last.source_nbytes - first.source_offset


def _fetch(source: Source, buffer: memoryview, group: Group) -> memoryview:
    """Read a group to where its page begins in the buffer; return where it lies."""
    begin = group.begin // _PAGE_NBYTES * _PAGE_NBYTES
    done = 0
    if source.direct_fd is not None:
        whole = buffer[: -(-group.end // _PAGE_NBYTES) * _PAGE_NBYTES - begin]
        try:
            done = os.preadv(source.direct_fd, [whole], begin)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # its offsets must be multiples of more than a page
                raise _read_error(exc) from exc
    # What is left, at the end of the file, is no multiple of a page.
    _read_fully(source.fd, buffer[: group.end - begin], begin, done)
    return buffer[group.begin - begin : group.end - begin]


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
