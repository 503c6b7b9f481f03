"""Reads ranges of an object in a bucket, several requests at a time.

Guarantee: the bytes come in the order in which they are asked for, and no more than `REQUESTS`
ranges, of at most `RANGE_NBYTES` each, are held at a time. Requests are tasks and not threads: one
that is under way can be given up at once, whatever its server does.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

from shmload._checkpoints.objects import fetch_async
from shmload._checkpoints.remote import RemoteObject
from shmload.workers.reader import Group, Span, Views, join, read_in_order

REQUESTS = 4
"""Requests that one worker makes at a time."""
RANGE_NBYTES = 8 << 20
"""Size of the largest range, in bytes."""
# To read a gap of this size takes less time than another request.
_MOST_GAP_NBYTES = 256 << 10
# While it waits, a worker says that it lives, and finds out whether its coordinator does.
_SIGN_OF_LIFE_S = 1.0


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
        self, wanted: RemoteObject, spans: Sequence[Span], wait_longer: Callable[[], None]
    ) -> Views:
        """Yield the bytes of each span of an object, in order.

        Args:
            wanted: the object.
            spans: none larger than `RANGE_NBYTES`.
            wait_longer: called every second while a request takes longer.

        Raises:
            ObjectChanged, ObjectMissing: the object is not what it was.
            FetchError: it cannot be read.
        """

        def begin(group: Group) -> "concurrent.futures.Future[Any]":
            request = fetch_async(wanted, group.begin, group.end)
            return asyncio.run_coroutine_threadsafe(request, self._loop)

        def wait_for(future: "concurrent.futures.Future[Any]") -> memoryview:
            while not concurrent.futures.wait([future], _SIGN_OF_LIFE_S).done:
                wait_longer()
            return memoryview(future.result())

        return read_in_order(join(spans, is_one_range), begin, REQUESTS, wait_for)


def is_one_range(first: Span, end: int, span: Span) -> bool:
    """Join spans that follow one another, with small gaps, into ranges."""
    is_near = end <= span.offset <= end + _MOST_GAP_NBYTES
    return is_near and span.end - first.offset <= RANGE_NBYTES


async def _cancel_others() -> None:
    """Cancel all other tasks of this loop, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
