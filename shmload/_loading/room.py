"""Room for the segments of one load, where no service makes it.

A load that lacks memory evicts what is idle, the least recently used first. With `SHMLOAD_BUDGET`,
a load whose segments stay also keeps all that is resident within that.

Guarantee: of the loads with a budget, one at a time looks for room, and waits for it while others
decode, with a deadline. What others decode has its length before the next one looks, so two loads
never take the same room.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from shmload._decoding.job import DecodeCancelled
from shmload._host.linux import shm_nbytes
from shmload._segments.capacity import require_room
from shmload._segments.eviction import Budget, evict_for, require_possible
from shmload._segments.listing import SegmentInfo
from shmload._segments.names import part_names, room_lock_name
from shmload._segments.removal import remove_if_free, remove_leftovers
from shmload._segments.turn import try_turn
from shmload._settings import settings
from shmload._wording import count_of, format_nbytes, logger_of
from shmload.errors import CapacityError, MemoryLimitExceeded, SharedMemoryFull

logger = logger_of(__name__)

_POLL_S = 0.05
# A wait that is shorter is not worth a message, in seconds.
_QUIET_S = 1.0
# A load that has ended gives its leases back slightly later, in seconds.
_SETTLE_S = 0.5
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

    def __call__(self, ahead: int = 0) -> None:
        if not self._is_said and time.monotonic() - self._began_at >= _QUIET_S:
            self._is_said = True
            logger.warning(
                "waiting for %s of room in %s, which other loads fill%s; `shmload ls` shows them",
                format_nbytes(self._nbytes),
                self._limit,
                f" ({count_of(ahead, 'load')} ahead)" if ahead else "",
            )


@contextlib.contextmanager
def made_room(
    nbytes: int,
    budget: Budget | None,
    *,
    is_charged_here: bool,
    is_cancelled: Callable[[], bool],
    beside_nbytes: int = 0,
) -> Iterator[list[SegmentInfo]]:
    """Make room for new segments; give their parts their length inside the block.

    Args:
        nbytes: size of the segments, in bytes.
        budget: limit for all that is resident; None for memory alone.
        is_charged_here: this process's memory limit pays for the segments. If not, a service has
            made room already.
        is_cancelled: asked now and then; when true, the wait for room ends.
        beside_nbytes: what this process needs besides, until they are filled, in bytes.

    Yields:
        The segments that were evicted for it.

    Raises:
        CapacityError: leased and pinned segments leave too little room.
        DecodeCancelled: `is_cancelled` was true.
    """
    if not is_charged_here:
        _require_room_elsewhere(nbytes, beside_nbytes)
        yield []
    elif budget is None or nbytes == 0:
        evicted: list[SegmentInfo] = []
        try:
            require_room(nbytes, beside_nbytes=beside_nbytes)
        except CapacityError:
            evicted = evict_for(nbytes, beside_nbytes=beside_nbytes)
        yield evicted
    else:
        ends_at = time.monotonic() + settings().wait_timeout_s
        wait = WaitForRoom(nbytes, budget.name)
        with _turn(nbytes, ends_at, is_cancelled, wait):
            yield _keep_within(budget, nbytes, beside_nbytes, ends_at, is_cancelled, wait)


def _require_room_elsewhere(nbytes: int, beside_nbytes: int) -> None:
    try:
        require_room(nbytes, is_charged_here=False, beside_nbytes=beside_nbytes)
    except CapacityError:
        if not remove_leftovers():
            raise
        require_room(nbytes, is_charged_here=False, beside_nbytes=beside_nbytes)


def _keep_within(
    budget: Budget,
    nbytes: int,
    beside_nbytes: int,
    ends_at: float,
    is_cancelled: Callable[[], bool],
    wait: WaitForRoom,
) -> list[SegmentInfo]:
    """Evict until new segments fit into a budget; wait while what others decode may end it.

    Returns:
        The segments that were evicted.

    Raises:
        CapacityError: it does not fit, and nothing that is decoded could change that in time.
    """
    quiet_since = time.monotonic()
    while True:
        now = time.monotonic()
        others = _parts_nbytes()
        try:
            return evict_for(nbytes, budget, others, beside_nbytes=beside_nbytes)
        except (SharedMemoryFull, MemoryLimitExceeded) as exc:
            require_possible(nbytes, budget, others, beside_nbytes=beside_nbytes)
            if others:
                quiet_since = now
            if now > ends_at:
                raise exc.after(settings().wait_timeout_s) from None
            if now - quiet_since > _SETTLE_S:
                raise
        if is_cancelled():
            raise DecodeCancelled
        wait()
        time.sleep(_POLL_S)


def _parts_nbytes() -> int:
    """Return the size of what is being decoded, in bytes; remove the parts of dead processes.

    This load's own parts have no length yet.
    """
    return sum(shm_nbytes(name) for name in part_names() if not remove_if_free(name, patience_s=0))


@contextlib.contextmanager
def _turn(
    nbytes: int, ends_at: float, is_cancelled: Callable[[], bool], wait: WaitForRoom
) -> Iterator[None]:
    """Hold the lock of the load that looks for room; if its process dies, the name is garbage.

    Raises:
        SharedMemoryFull: another load looks for room until `ends_at`.
    """
    while True:
        with try_turn(room_lock_name()) as is_mine:
            if is_mine:
                yield
                return
        if is_cancelled():
            raise DecodeCancelled
        if time.monotonic() > ends_at:
            remedy = (
                "another load still waits for room ahead of this one after "
                f"{settings().wait_timeout_s:g} s; end it (`shmload ls`), load again later, or "
                f"raise SHMLOAD_WAIT_TIMEOUT_S or {_NAME}"
            )
            raise SharedMemoryFull(nbytes, None, _NAME, remedy)
        wait()
        time.sleep(_POLL_S)
