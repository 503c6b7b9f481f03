"""Room in the budget that loads have reserved, and the loads that wait for some.

    reserve --there is room--> decodes --settle--> waits for other builders --finish--> ends
       |                          ^
       +--none, but a load runs--> waits --> room: the first in the queue gets it
                                     +-----> nothing runs, or its deadline: refused

Loads wait in order of arrival, so a large one does not starve behind small ones. If nothing runs
and there is no room for the first, the next that does fit goes ahead: the first may wait for it.

Guarantee: a load is refused only if nothing that runs could make room for it, or after its
deadline. A load that waits for others' parts does not count as one that runs, so no circle of
loads waits for ever. Nor does one that came later and only attaches what is resident: else a row of
these would hold up each refusal until the deadline.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from shmload._wording import count_of
from shmload.errors import CapacityError, SharedMemoryFull

_POLL_S = 0.1
# How often to look again while loads run: a process that ends gives leases back without a word.
_LOOK_AGAIN_S = 1.0
# A worker releases a filled segment slightly after its client is told, a load gives its leases back
# slightly after it is finished, and a process that lists segments holds each briefly.
_SETTLE_S = 0.5

OnWait = Callable[[int], None]
"""Called several times a second with the number of loads ahead; what it raises ends the wait."""


class Memory(Protocol):
    """Where room comes from."""

    def make_room(self, nbytes: int, reserved: int) -> list[str]:
        """Evict enough for `nbytes` beside `reserved` bytes; return the names of what went.

        Raises:
            CapacityError: that is impossible now.
        """

    def require_possible(self, nbytes: int, reserved: int) -> None:
        """Check that there would be room if the loads gave back all they have.

        Raises:
            CapacityError: there would not.
        """


class Claim:
    """What one client's load has reserved, and whether it runs."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Room that it has reserved and not used yet, in bytes."""
        self.is_ending = False
        """Whether it has all its segments, and gives its leases back soon."""
        self.is_waiting = False
        """Whether it waits for room."""
        self.has_reserved = False
        """Whether it ever reserved room; else its load only attaches what is resident."""
        self.began_at = time.monotonic()
        """When it was made, in seconds of the monotonic clock."""

    @property
    def runs(self) -> bool:
        """Whether it can give something back without waiting for another load."""
        return not self.is_waiting and (self.is_ending or self.nbytes > 0)

    def counts_for(self, request: "_Request") -> bool:
        """Whether what it gives back may be what a request lacks.

        A load that came later and only attaches holds nothing that the request could have had.
        """
        return self.has_reserved or self.began_at <= request.began_at


class _Request:
    """A claim that wants more room; `is_stuck` after it was tried in vain while nothing ran.

    `quiet_since` is when something last happened that could have made room for it.
    """

    def __init__(self, claim: Claim, nbytes: int, timeout_s: float) -> None:
        self.claim = claim
        self.nbytes = nbytes
        self.timeout_s = timeout_s
        self.began_at = time.monotonic()
        self.quiet_since = self.began_at
        self.looks_at = 0.0
        self.is_stuck = False


class Reservations:
    """The claims of all clients; thread-safe.

    Args:
        memory: asked by one thread at a time.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._claims: set[Claim] = set()
        self._queue: list[_Request] = []

    @property
    def nbytes(self) -> int:
        """Room that is reserved and not used yet, in bytes."""
        with self._changed:
            return self._reserved()

    @property
    def waiting(self) -> int:
        """Number of loads that wait for room."""
        return len(self._queue)

    @contextlib.contextmanager
    def claim(self) -> Iterator[Claim]:
        """Make a claim for one client; the room goes back when the context ends."""
        claim = Claim()
        with self._changed:
            self._claims.add(claim)
        try:
            yield claim
        finally:
            with self._changed:
                self._claims.remove(claim)
                self._note_change(claim)

    def settle(self, claim: Claim) -> None:
        """Give back the room of a claim, because segments fill it now or it is not needed."""
        with self._changed:
            claim.nbytes = 0
            self._note_change(claim)

    def finish(self, claim: Claim) -> None:
        """Note that a load has all its segments, and ends without waiting for other loads."""
        with self._changed:
            claim.nbytes = 0
            claim.is_ending = True
            self._note_change(claim)

    def reserve(
        self, claim: Claim, nbytes: int, timeout_s: float, on_wait: OnWait = lambda ahead: None
    ) -> list[str]:
        """Reserve room, and wait for it as long as a load that runs could give some back.

        Args:
            claim: who reserves.
            nbytes: how much, in bytes.
            timeout_s: how long to wait at most, in seconds.
            on_wait: see `OnWait`; called without a lock.

        Returns:
            The names of segments that were evicted.

        Raises:
            CapacityError: nothing that runs could make room, or `timeout_s` has passed.
        """
        request = _Request(claim, nbytes, timeout_s)
        with self._in_queue(request):
            while (evicted := self._try(request)) is None:
                on_wait(self._ahead(request))
            return evicted

    @contextlib.contextmanager
    def _in_queue(self, request: _Request) -> Iterator[None]:
        with self._changed:
            if self._queue:  # it will wait, so refuse at once what will never fit
                self._memory.require_possible(request.nbytes, self._reserved())
            self._queue.append(request)
            request.claim.is_waiting = True
            request.claim.is_ending = False
        try:
            yield
        finally:
            with self._changed:
                self._queue.remove(request)
                request.claim.is_waiting = False
                self._note_change(request.claim)

    def _try(self, request: _Request) -> list[str] | None:
        """Try to get the room; if there is none yet, wait a moment and return None.

        Raises:
            CapacityError: the request is refused.
        """
        with self._changed:
            now = time.monotonic()
            is_late = now - request.began_at >= request.timeout_s
            if self._may_try(request) and (is_late or now >= request.looks_at):
                try:
                    evicted = self._memory.make_room(request.nbytes, self._reserved())
                except CapacityError as exc:
                    self._require_hope(request, exc, now, is_late=is_late)
                else:
                    request.claim.nbytes += request.nbytes
                    request.claim.has_reserved = True
                    request.is_stuck = False
                    return evicted
                request.looks_at = now + _LOOK_AGAIN_S if self._is_any_running(request) else now
            elif is_late:
                raise _late_in_queue(request, self._ahead(request))
            self._changed.wait(_POLL_S)
            return None

    def _ahead(self, request: _Request) -> int:
        with self._changed:
            return self._queue.index(request)

    def _may_try(self, request: _Request) -> bool:
        """Tell whether it is a request's turn."""
        ahead = self._queue[: self._queue.index(request)]
        if not ahead:
            return True
        return not self._is_any_running(request) and all(each.is_stuck for each in ahead)

    def _require_hope(
        self, request: _Request, refusal: CapacityError, looked_at: float, *, is_late: bool
    ) -> None:
        """Return if room may come for a request that has found none since a time; else raise.

        Raises:
            CapacityError: nothing that runs could make room, or it is too late.
        """
        self._memory.require_possible(request.nbytes, self._reserved())
        if is_late:
            raise refusal.after(request.timeout_s)
        if self._is_any_running(request):
            return
        request.is_stuck = True
        # A look may take long on a busy machine.
        has_settled = looked_at - request.quiet_since > _SETTLE_S
        if has_settled and all(each.is_stuck for each in self._queue):
            raise refusal

    def _is_any_running(self, request: _Request) -> bool:
        return any(claim.runs and claim.counts_for(request) for claim in self._claims)

    def _reserved(self) -> int:
        return sum(claim.nbytes for claim in self._claims)

    def _note_change(self, claim: Claim) -> None:
        """Let all that wait look again, since a claim has changed."""
        now = time.monotonic()
        for request in self._queue:
            if claim.counts_for(request):
                request.quiet_since = now
            request.is_stuck = False
            request.looks_at = 0.0
        self._changed.notify_all()


def _late_in_queue(request: _Request, ahead: int) -> CapacityError:
    remedy = (
        f"this load is still behind {count_of(ahead, 'load')} after {request.timeout_s:g} s; load "
        "again later, or raise SHMLOAD_WAIT_TIMEOUT_S or `shmload serve --budget`"
    )
    return SharedMemoryFull(request.nbytes, None, "the service's budget", remedy)
