"""Waiting for room in a budget: of loads without a service, or of a service's clients.

Guarantee: one load at a time looks for room, and it waits as long as others may give some back,
with a deadline. The rest wait behind it, so a large load does not starve behind small ones. A load
is refused only if nothing that runs could make room for it, or after its deadline.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shmload._segments.eviction import Budget, evict_for, require_possible
from shmload._segments.listing import SegmentInfo
from shmload.errors import MemoryLimitExceeded, SharedMemoryFull

_POLL_S = 0.05
# How often to look again while loads run: a process that ends gives leases back without a word.
_LOOK_AGAIN_S = 1.0
# How long nothing may run before a load is refused. A load that has ended gives its leases back
# slightly later, and a process that lists segments holds each briefly.
_SETTLE_S = 0.5


class UnderWay(NamedTuple):
    """What the other loads do."""

    nbytes: int
    """Size of the segments that they decode, in bytes, as far as it is not resident yet."""
    is_ending: bool = False
    """Whether one has all that it decodes, and gives its leases back soon."""


@contextlib.contextmanager
def room_within(
    budget: Budget,
    nbytes: int,
    look: Callable[[], UnderWay],
    go_on: Callable[[], None],
    *,
    turn: Callable[[], contextlib.AbstractContextManager[bool]],
    timeout_s: float,
) -> Iterator[list[SegmentInfo]]:
    """Make room for new segments within a budget; note inside the block that they take it.

    Args:
        budget: limit for all that is resident.
        nbytes: size of the new segments, in bytes.
        look: returns what the other loads do now.
        go_on: called several times a second during a wait; what it raises ends the wait.
        turn: tries for the lock of the load that looks for room, and holds it in a block.
        timeout_s: how long to wait at most, in seconds.

    Yields:
        The segments that were evicted for it.

    Raises:
        CapacityError: nothing that runs could make room, or `timeout_s` has passed.
    """
    ends_at = time.monotonic() + timeout_s
    with _when_free(turn, budget, nbytes, go_on, ends_at, timeout_s):
        tried, again_at, quiet_since = None, 0.0, 0.0
        while True:
            now = time.monotonic()
            others = look()
            is_busy = others.nbytes > 0 or others.is_ending
            if is_busy or others != tried:
                quiet_since = now
            if others != tried or now >= min(again_at, ends_at):
                try:
                    evicted = evict_for(nbytes, budget, others.nbytes)
                    break
                except (SharedMemoryFull, MemoryLimitExceeded) as exc:
                    require_possible(nbytes, budget, others.nbytes)
                    if now >= ends_at:
                        raise exc.after(timeout_s) from None
                    if now - quiet_since > _SETTLE_S:
                        raise
                tried, again_at = others, now + (_LOOK_AGAIN_S if is_busy else 0)
            go_on()
            time.sleep(_POLL_S)
        yield evicted


@contextlib.contextmanager
def _when_free(
    turn: Callable[[], contextlib.AbstractContextManager[bool]],
    budget: Budget,
    nbytes: int,
    go_on: Callable[[], None],
    ends_at: float,
    timeout_s: float,
) -> Iterator[None]:
    """Hold the lock of the load that looks for room.

    Raises:
        CapacityError: another load looks for room until `ends_at`, or no wait would help.
    """
    has_waited = False
    while True:
        with turn() as is_mine:
            if is_mine:
                yield
                return
        if not has_waited:
            require_possible(nbytes, budget)
            has_waited = True
        if time.monotonic() >= ends_at:
            remedy = (
                "another load still waits for room ahead of this one after "
                f"{timeout_s:g} s; end it (`shmload ls`), load again later, raise "
                f"SHMLOAD_WAIT_TIMEOUT_S, or {budget.ways[0]}"
            )
            raise SharedMemoryFull(nbytes, None, budget.name, remedy)
        go_on()
        time.sleep(_POLL_S)
