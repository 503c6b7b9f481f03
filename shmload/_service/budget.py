"""The service's budget for resident segments, and the room in it that loads have reserved.

What goes to stay within it is decided in `_segments.eviction`; `_segments.room` waits for it. A
load that waits for others' parts has nothing reserved, so no circle of loads waits for ever.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from shmload._host.procfs import cgroup_limit_nbytes
from shmload._host.shm import shm_total_nbytes
from shmload._segments.eviction import Budget
from shmload._segments.listing import SegmentInfo
from shmload._segments.room import UnderWay, room_within
from shmload._wording import format_nbytes


def service_budget(nbytes: int) -> Budget:
    """Return a service's budget of so many bytes."""
    return Budget(
        nbytes,
        "the service's budget",
        ("raise `shmload serve --budget`", "load without the service, with SHMLOAD_SERVICE=off"),
    )


class Claim:
    """What one client's load has reserved."""

    nbytes = 0
    """Room that it has reserved and not used yet, in bytes."""
    is_ending = False
    """Whether it has all its segments, and gives its leases back soon."""


class Reservations:
    """The claims of all clients; thread-safe.

    Args:
        budget: what they share.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._claims: set[Claim] = set()
        self._waiting: set[Claim] = set()
        self._looking = threading.Lock()  # of the load that looks for room

    @property
    def nbytes(self) -> int:
        """Room that is reserved and not used yet, in bytes."""
        return sum(claim.nbytes for claim in tuple(self._claims))

    @property
    def clients(self) -> int:
        """Number of clients that have a claim."""
        return len(self._claims)

    @property
    def waiting(self) -> int:
        """Number of loads that wait for room."""
        return len(self._waiting)

    @contextlib.contextmanager
    def claim(self) -> Iterator[Claim]:
        """Make a claim for one client; the room goes back when the context ends."""
        claim = Claim()
        self._claims.add(claim)
        try:
            yield claim
        finally:
            self._claims.remove(claim)

    def reserve(
        self, claim: Claim, nbytes: int, timeout_s: float, on_wait: Callable[[], None]
    ) -> list[SegmentInfo]:
        """Reserve room, and wait for it as long as a load that runs could give some back.

        Args:
            claim: who reserves.
            nbytes: how much, in bytes.
            timeout_s: how long to wait at most, in seconds.
            on_wait: called several times a second during a wait; what it raises ends the wait.

        Returns:
            The segments that were evicted.

        Raises:
            CapacityError: as `room_within`.
        """
        known: set[Claim] = set()

        def look() -> UnderWay:
            # A load that comes later and only attaches holds nothing that this one could have had.
            known.update(() if known else self._claims)
            is_ending = any(each.is_ending for each in known & self._claims)
            return UnderWay(self.nbytes, is_ending)

        def go_on() -> None:
            self._waiting.add(claim)
            on_wait()

        claim.is_ending = False
        try:
            with room_within(
                self._budget, nbytes, look, go_on, turn=self._turn, timeout_s=timeout_s
            ) as evicted:
                claim.nbytes += nbytes
        finally:
            self._waiting.discard(claim)
        return evicted

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        is_mine = self._looking.acquire(blocking=False)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._looking.release()


def default_budget() -> int:
    """Return half of the smaller limit, /dev/shm or the memory control group, in bytes."""
    return min(_limits().values()) // 2


def budget_warnings(
    budget: int, resident: Iterable[SegmentInfo], file_nbytes: int | None = None
) -> Iterator[str]:
    """Yield warnings for a budget that cannot be reached or is exceeded already.

    Args:
        budget: in bytes.
        resident: all segments at the start of the service.
        file_nbytes: the largest file that the service may write, in bytes; None for no limit.
    """
    if budget == 0:
        yield "the budget is 0: each load that keeps weights is refused"
    if file_nbytes is not None and file_nbytes < budget:
        yield (
            f"RLIMIT_FSIZE lets the service write files of {format_nbytes(file_nbytes)}; it "
            "refuses a load with a larger segment; raise it with `ulimit -f unlimited`, or "
            "LimitFSIZE= of a systemd unit"
        )
    for name, nbytes in _limits().items():
        if budget > nbytes:
            yield (
                f"the budget is {format_nbytes(budget)} but {name} allows for "
                f"{format_nbytes(nbytes)}; what is resident stays within that"
            )
    nbytes = sum(info.nbytes for info in resident)
    if nbytes > budget:
        yield (
            f"{format_nbytes(nbytes)} are resident already, more than the budget of "
            f"{format_nbytes(budget)}; the excess is evicted at the next decode"
        )


def _limits() -> dict[str, int]:
    """Return the limits for all segments together, in bytes, by name."""
    limits = {"/dev/shm": shm_total_nbytes(), "the memory control group": cgroup_limit_nbytes()}
    return {name: limit for name, limit in limits.items() if limit is not None}
