"""Reads ranges of an object in a bucket, several requests at a time.

Guarantee: the bytes come in the order in which they are asked for, and no more than `REQUESTS`
ranges, of at most `RANGE_NBYTES` each, are held at a time.
"""

import collections
import concurrent.futures
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shmload._checkpoints.objects import fetch
from shmload._checkpoints.remote import RemoteObject

if TYPE_CHECKING:
    from shmload.workers.reader import Span

REQUESTS = 4
"""Requests that one worker makes at a time."""
RANGE_NBYTES = 8 << 20
"""Size of the largest range, in bytes."""
# To read a gap of this size takes less time than another request.
_MOST_GAP_NBYTES = 256 << 10
# While it waits, a worker says that it lives.
_SIGN_OF_LIFE_S = 5.0


class Range(NamedTuple):
    """Spans that one request gets, with what lies between them."""

    begin: int
    end: int
    spans: "Sequence[Span]"


class RangeReader:
    """Makes requests in threads of its own, until `close`; not for several threads."""

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(REQUESTS, "shmload-ranges")

    def close(self) -> None:
        """End the threads; a second call is fine."""
        self._threads.shutdown(cancel_futures=True)

    def read(
        self, wanted: RemoteObject, spans: "Sequence[Span]", wait_longer: Callable[[], None]
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of each span of an object, in order.

        Args:
            wanted: the object.
            spans: none larger than `RANGE_NBYTES`.
            wait_longer: called every 5 s while a request takes longer.

        Raises:
            ObjectChanged, ObjectMissing: the object is not what it was.
            FetchError: it cannot be read.
        """
        waiting = join_spans(spans)
        under_way: collections.deque[tuple[Range, concurrent.futures.Future[Any]]]
        under_way = collections.deque()

        def go_on() -> None:
            while len(under_way) < REQUESTS and (each := next(waiting, None)):
                future = self._threads.submit(fetch, wanted, each.begin, each.end)
                under_way.append((each, future))

        try:
            go_on()
            while under_way:
                each, future = under_way.popleft()
                content = memoryview(_result(future, wait_longer))
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
