"""Reads ranges of an object in a bucket, several requests at a time.

Guarantee: the bytes come in the order in which they are asked for, and no more than `REQUESTS`
ranges, of at most `RANGE_NBYTES` each, are held at a time. Requests are tasks and not threads: one
that is under way can be given up at once, whatever its server does.
"""

import asyncio
import collections
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shmload._checkpoints.objects import fetch_async
from shmload._checkpoints.remote import RemoteObject

if TYPE_CHECKING:
    from shmload.workers.reader import Span

REQUESTS = 4
"""Requests that one worker makes at a time."""
RANGE_NBYTES = 8 << 20
"""Size of the largest range, in bytes."""
# To read a gap of this size takes less time than another request.
_MOST_GAP_NBYTES = 256 << 10
# While it waits, a worker says that it lives, and finds out whether its coordinator does.
_SIGN_OF_LIFE_S = 1.0


class Range(NamedTuple):
    """Spans that one request gets, with what lies between them."""

    begin: int
    end: int
    spans: "Sequence[Span]"


class RangeReader:
    """Makes requests in a thread of its own, until `close`; not for several threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a process that ends without `close` does not wait for a server.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="shmload-ranges", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, and the requests that are under way; a second call is fine."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def read(
        self, wanted: RemoteObject, spans: "Sequence[Span]", wait_longer: Callable[[], None]
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of each span of an object, in order.

        Args:
            wanted: the object.
            spans: none larger than `RANGE_NBYTES`.
            wait_longer: called every second while a request takes longer.

        Raises:
            ObjectChanged, ObjectMissing: the object is not what it was.
            FetchError: it cannot be read.
        """
        waiting = join_spans(spans)
        under_way: collections.deque[tuple[Range, concurrent.futures.Future[Any]]]
        under_way = collections.deque()

        def go_on() -> None:
            while len(under_way) < REQUESTS and (each := next(waiting, None)):
                request = fetch_async(wanted, each.begin, each.end)
                future = asyncio.run_coroutine_threadsafe(request, self._loop)
                under_way.append((each, future))

        try:
            go_on()
            while under_way:
                each, future = under_way[0]
                content = memoryview(_result(future, wait_longer))
                under_way.popleft()
                go_on()
                for offset, nbytes in each.spans:
                    yield content[offset - each.begin : offset - each.begin + nbytes]
        finally:
            for _, future in under_way:
                future.cancel()


def join_spans(spans: "Sequence[Span]") -> Iterator[Range]:
    """Join spans that follow one another, with small gaps, into ranges."""
    first = 0
    for number in range(1, len(spans)):
        before, span = spans[number - 1], spans[number]
        end = before.offset + before.nbytes
        is_near = end <= span.offset <= end + _MOST_GAP_NBYTES
        if not (is_near and span.offset + span.nbytes - spans[first].offset <= RANGE_NBYTES):
            yield Range(spans[first].offset, end, spans[first:number])
            first = number
    if spans:
        yield Range(spans[first].offset, spans[-1].offset + spans[-1].nbytes, spans[first:])


def _result(future: "concurrent.futures.Future[Any]", wait_longer: Callable[[], None]) -> Any:
    while not concurrent.futures.wait([future], _SIGN_OF_LIFE_S).done:
        wait_longer()
    return future.result()


async def _cancel_others() -> None:
    """Cancel all other tasks of this loop, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
