"""Room for the segments of one load, where no service makes it.

A load that lacks memory evicts what is idle, the least recently used first. With `SHMLOAD_BUDGET`,
a load whose segments stay also keeps all that is resident within that.

Guarantee: what others decode has its length before the next load looks for room, so two loads never
take the same room.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from shmload._decoding.job import DecodeCancelled
from shmload._host.shm import shm_nbytes
from shmload._segments.eviction import Budget, evict_for, require_room
from shmload._segments.listing import SegmentInfo
from shmload._segments.names import part_names, try_turn
from shmload._segments.removal import remove_if_free, remove_leftovers
from shmload._segments.room import UnderWay, room_within
from shmload._settings import settings
from shmload._wording import format_nbytes, logger_of
from shmload.errors import CapacityError

logger = logger_of(__name__)

# A wait that is shorter is not worth a message, in seconds.
_QUIET_S = 1.0
_NAME = "SHMLOAD_BUDGET"


def own_budget() -> Budget | None:
    """Return the budget of loads without a service; None if the settings have none."""
    nbytes = settings().budget
    return None if nbytes is None else Budget(nbytes, _NAME, (f"raise {_NAME}",))


class WaitForRoom:
    """Says once, after a moment, that a load waits for room; call it now and then.

    Args:
        nbytes: size of its segments, in bytes.
        limit: what has no room for them.
    """

    def __init__(self, nbytes: int, limit: str) -> None:
        self._nbytes = nbytes
        self._limit = limit
        self._began_at = time.monotonic()
        self._is_said = False

    def __call__(self) -> None:
        if not self._is_said and time.monotonic() - self._began_at >= _QUIET_S:
            self._is_said = True
            logger.warning(
                "waiting for %s of room in %s, which other loads fill; `shmload ls` shows them",
                format_nbytes(self._nbytes),
                self._limit,
            )


@contextlib.contextmanager
def made_room(
    nbytes: int,
    budget: Budget | None,
    *,
    is_charged_here: bool,
    is_cancelled: Callable[[], bool],
) -> Iterator[list[SegmentInfo]]:
    """Make room for new segments; give their parts their length inside the block.

    Args:
        nbytes: size of the segments, in bytes.
        budget: limit for all that is resident; None for memory alone.
        is_charged_here: this process's memory limit pays for the segments. If not, a service has
            made room already.
        is_cancelled: asked now and then; when true, the wait for room ends.

    Yields:
        The segments that were evicted for it.

    Raises:
        CapacityError: leased and pinned segments leave too little room.
        DecodeCancelled: `is_cancelled` was true.
    """
    if not is_charged_here:
        _require_room_elsewhere(nbytes)
        yield []
    elif budget is None or nbytes == 0:
        gone: list[SegmentInfo] = []
        try:
            require_room(nbytes)
        except CapacityError:
            gone = evict_for(nbytes)
        yield gone
    else:
        say = WaitForRoom(nbytes, budget.name)

        def go_on() -> None:
            if is_cancelled():
                raise DecodeCancelled
            say()

        with room_within(
            budget,
            nbytes,
            lambda: UnderWay(_parts_nbytes()),
            go_on,
            turn=lambda: try_turn("room"),
            timeout_s=settings().wait_timeout_s,
        ) as evicted:
            yield evicted


def _require_room_elsewhere(nbytes: int) -> None:
    try:
        require_room(nbytes, is_charged_here=False)
    except CapacityError:
        if not remove_leftovers():
            raise
        require_room(nbytes, is_charged_here=False)


def _parts_nbytes() -> int:
    """Return the size of what is being decoded, in bytes; remove the parts of dead processes.

    This load's own parts have no length yet.
    """
    return sum(shm_nbytes(name) for name in part_names() if not remove_if_free(name, patience_s=0))
