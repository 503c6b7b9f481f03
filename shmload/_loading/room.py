"""Room for the segments of one load: within a service's budget, one of the settings, or memory.

A load that lacks memory evicts what is idle, the least recently used first. With `SHMLOAD_BUDGET`,
a load whose segments stay also keeps all that is resident within that.

Guarantee: what others decode has its length before the next load looks for room, so two loads never
take the same room.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from shmload._checkpoints.source import Source
from shmload._decoding.job import DecodeCancelled
from shmload._host.shm import shm_nbytes
from shmload._segments.eviction import Budget, evict_for, require_room
from shmload._segments.listing import SegmentInfo, segments_by_lock
from shmload._segments.metadata import source_text
from shmload._segments.names import part_names, try_turn
from shmload._segments.removal import remove_if_free
from shmload._segments.room import UnderWay, room_within
from shmload._segments.roots import Root, find_roots
from shmload._service.client import Client, find_service
from shmload._settings import settings
from shmload._wording import format_nbytes, logger_of
from shmload.errors import CapacityError, ServiceUnavailable

logger = logger_of(__name__)

# A wait that is shorter is not worth a message, in seconds.
_QUIET_S = 1.0

_Answer = TypeVar("_Answer")


def own_budget() -> Budget | None:
    """Return the budget of loads without a service; None if the settings have none."""
    nbytes = settings().budget
    return None if nbytes is None else Budget(nbytes, "SHMLOAD_BUDGET", ("raise SHMLOAD_BUDGET",))


def waiting_for_room(
    nbytes: int, limit: str, is_cancelled: Callable[[], bool]
) -> Callable[[], None]:
    """Return what says once, after a moment, that a load waits for room; call it now and then.

    Args:
        nbytes: size of its segments, in bytes.
        limit: what has no room for them.
        is_cancelled: when true, the call raises DecodeCancelled.
    """
    told_at = time.monotonic() + _QUIET_S

    def go_on() -> None:
        nonlocal told_at
        if is_cancelled():
            raise DecodeCancelled
        if time.monotonic() >= told_at:
            told_at = math.inf
            logger.warning(
                "waiting for %s of room in %s, which other loads fill; `shmload ls` shows them",
                format_nbytes(nbytes),
                limit,
            )

    return go_on


@contextlib.contextmanager
def made_room(
    nbytes: int, budget: Budget | None, is_cancelled: Callable[[], bool]
) -> Iterator[list[SegmentInfo]]:
    """Make room for new segments; give their parts their length inside the block.

    Args:
        nbytes: size of the segments, in bytes.
        budget: limit for all that is resident; None for memory alone.
        is_cancelled: asked now and then; when true, the wait for room ends.

    Yields:
        The segments that were evicted for it.

    Raises:
        CapacityError: leased and pinned segments leave too little room.
        DecodeCancelled: `is_cancelled` was true.
    """
    if budget is None or nbytes == 0:
        gone: list[SegmentInfo] = []
        try:
            require_room(nbytes)
        except CapacityError:
            gone = evict_for(nbytes)
        yield gone
    else:
        with room_within(
            budget,
            nbytes,
            lambda: UnderWay(_parts_nbytes()),
            waiting_for_room(nbytes, budget.name, is_cancelled),
            turn=lambda: try_turn("room"),
            timeout_s=settings().wait_timeout_s,
        ) as evicted:
            yield evicted


def _parts_nbytes() -> int:
    """Return the size of what is being decoded, in bytes; remove the parts of dead processes.

    This load's own parts have no length yet.
    """
    return sum(shm_nbytes(name) for name in part_names() if not remove_if_free(name, patience_s=0))


class AtService:
    """What one load asks of the running service, if there is one; `close` ends it.

    While the load lasts, other loads wait for the room that it may give back. If the service goes
    away, the load goes on without it, unless the settings require it.

    Args:
        source: what is loaded.
        is_cancelled: asked now and then; when true, a wait for room ends.
    """

    def __init__(self, source: Source, is_cancelled: Callable[[], bool]) -> None:
        self._source = source
        self._is_cancelled = is_cancelled
        self._client: Client | None = None

    def connect(self) -> None:
        """Find the service.

        Raises:
            ServiceError, ProtocolError: no service is usable, and the settings require one.
        """
        self._client = find_service()

    def reserve(self, nbytes: int) -> tuple[list[SegmentInfo], Budget | None]:
        """Reserve room for resident segments; waits while loads that run may give room back.

        Returns:
            The segments that the service has evicted for them; and the budget that the load itself
            has to keep to, where no service does that.

        Raises:
            CapacityError: the budget has no room for them.
        """
        before = segments_by_lock() if self._client else []  # what went has no header left to read
        go_on = waiting_for_room(nbytes, "the service's budget", self._is_cancelled)
        names = self._ask(lambda it: it.reserve(self._model, nbytes, go_on, self._is_cancelled))
        gone = [info for info in before if info.name in (names or ())]
        return gone, None if self._client else own_budget()

    def settle(self) -> None:
        """Tell the service that the segments it reserved room for are resident now."""
        self._ask(Client.settle)

    def note(self, found: Sequence[str], made: Sequence[str]) -> None:
        """Tell the service the names of the segments that were attached and decoded."""
        self._ask(lambda client: client.note(self._model, found, made))

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        client, self._client = self._client, None
        if client:
            client.close()

    @functools.cached_property
    def _model(self) -> Root:
        """What is loaded, by which the service counts: as the listings name it."""
        source = self._source
        paths = [source_text(os.path.abspath(path)) for path in source.shards or [source.root]]
        roots = find_roots(paths)
        # Components that lack the variant have plain files.
        of_variant = (root for root in roots.values() if root.variant == (source.variant or ""))
        return next(of_variant, roots[paths[0]])

    def _ask(self, ask: Callable[[Client], _Answer]) -> _Answer | None:
        """Ask the service; if it goes away, forget it unless it is required."""
        try:
            return ask(self._client) if self._client else None
        except ServiceUnavailable as exc:
            if settings().service == "require" or self._is_cancelled():
                raise
            logger.warning("%s; loading without it", exc)
            self.close()
            return None
