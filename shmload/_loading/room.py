"""Room for the segments of one load: within the budget, or in memory where there is none.

The budget is that of the running service, or SHMLOAD_BUDGET. A load whose segments stay keeps all
that is resident within it, and evicts what is idle, the least recently used first.

Guarantee: one load at a time looks for room, and what it is to decode has its length before the
next one looks. So two loads never take the same room. But a load without a budget goes on without
the lock after 10 s, and at once if the lock's name is another user's or no inode is left.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from shmload._decoding.coordinator import DecodeCancelled
from shmload._host.shm import no_room, shm_stat
from shmload._segments.eviction import Budget, evict_for, require_room
from shmload._segments.listing import SegmentInfo
from shmload._segments.names import part_names, try_turn
from shmload._segments.removal import remove_if_free
from shmload._segments.segment import SHARED
from shmload._service.notice import service_budget, service_status
from shmload._settings import settings
from shmload._wording import format_nbytes, logger_of
from shmload.errors import CapacityError, SegmentUntrusted, SharedMemoryFull

logger = logger_of(__name__)

# A wait that is shorter is not worth a message, in seconds.
_QUIET_S = 1.0
_POLL_S = 0.05
# A turn takes milliseconds; up to a second if the mappings of many processes are read in it.
_TURN_S = 10.0
_TURN_POLL_S = 0.005
# How long nothing may be decoded before a load is refused, in seconds. A load that has ended gives
# its leases back slightly later, and a process that lists segments holds each briefly.
_SETTLE_S = 0.5


def chosen_budget() -> Budget | None:
    """Return the budget that loads keep to; None if there is none."""
    status = service_status()
    if status:
        return service_budget(status.budget_nbytes)
    nbytes = settings().budget
    return None if nbytes is None else Budget(nbytes, "SHMLOAD_BUDGET", "raise SHMLOAD_BUDGET")


@contextlib.contextmanager
def made_room(
    nbytes: int, budget: Budget | None, is_cancelled: Callable[[], bool], *, waits: bool = True
) -> Iterator[list[SegmentInfo]]:
    """Make room for new segments; give their parts their length inside the block.

    Args:
        nbytes: size of the segments, in bytes.
        budget: limit for all that is resident; None for memory alone.
        is_cancelled: asked now and then; when true, the wait for room ends.
        waits: for loads that decode now, and may then give room within the budget.

    Yields:
        The segments that were evicted for it.

    Raises:
        CapacityError: leased and pinned segments leave too little room.
        DecodeCancelled: `is_cancelled` was true.
    """
    gone: list[SegmentInfo] = []
    if not nbytes:
        yield gone
    elif budget:
        with _room_within(budget, nbytes, is_cancelled, waits=waits) as gone:
            yield gone
    else:
        with _turn(is_cancelled):
            try:
                require_room(nbytes)
            except CapacityError:
                gone = evict_for(nbytes)
            yield gone


@contextlib.contextmanager
def _turn(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Be the only load that looks for room; go on without that if it cannot be.

    Raises:
        DecodeCancelled: `is_cancelled` was true.
    """
    began_at = time.monotonic()
    has_told = False
    while not is_cancelled():
        waited_s = time.monotonic() - began_at
        with contextlib.ExitStack() as turn:
            try:
                is_mine = turn.enter_context(try_turn("room"))
            except (SegmentUntrusted, SharedMemoryFull):  # another user's, or no inode is left
                is_mine = True
            if is_mine or waited_s > _TURN_S:
                yield
                return
        if not has_told and waited_s > _QUIET_S:
            has_told = True
            words = "waiting at most %g s for another process that looks for room"
            logger.warning(words, _TURN_S)
        time.sleep(_TURN_POLL_S)
    raise DecodeCancelled


@contextlib.contextmanager
def _room_within(
    budget: Budget, nbytes: int, is_cancelled: Callable[[], bool], *, waits: bool
) -> Iterator[list[SegmentInfo]]:
    """Make room within a budget, one load at a time; wait while other loads decode.

    Raises:
        CapacityError: no other load that could give room decodes, or this one does not wait for it;
            or `wait_timeout_s` has passed.
        SegmentUntrusted: the lock's name belongs to another user.
    """
    began_at = time.monotonic()
    ends_at = began_at + (settings().wait_timeout_s if waits else _TURN_S)
    last_busy_at = -math.inf
    has_told = False
    while not is_cancelled():
        with try_turn("room") as is_mine:
            now = time.monotonic()
            if is_mine:
                others = _parts_nbytes()
                last_busy_at = now if others else last_busy_at
                try:
                    evicted = evict_for(nbytes, budget, others)
                except CapacityError as exc:
                    is_settled = now - last_busy_at > _SETTLE_S
                    if is_settled or not waits or nbytes > budget.nbytes:
                        raise
                    if now > ends_at:
                        exc.args = (
                            f"{exc}; loads that run may free some, but not within "
                            f"{settings().wait_timeout_s:g} s (SHMLOAD_WAIT_TIMEOUT_S)",
                        )
                        raise
                else:
                    yield evicted
                    return
            elif now > ends_at:
                remedy = "end the stopped process that looks for room"
                raise no_room(nbytes, None, budget.name, remedy)
        if not has_told and now - began_at > _QUIET_S:
            has_told = True
            words = "waiting for %s of room in %s, which other loads fill; `shmload ls` shows them"
            logger.warning(words, format_nbytes(nbytes), budget.name)
        time.sleep(_POLL_S)
    raise DecodeCancelled


def _parts_nbytes() -> int:
    """Return the size of what is decoded to stay, in bytes; remove the parts of dead processes.

    This load's own parts have no length yet.
    """
    found = [shm_stat(name) for name in part_names() if not remove_if_free(name)]
    return sum(each.st_size for each in found if each and not each.st_mode & SHARED)
