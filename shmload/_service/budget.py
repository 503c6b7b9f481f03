"""The budget for resident segments, and which ones to evict: plain functions on values."""

from collections.abc import Iterable, Iterator, Sequence

from shmload._host.linux import shm_total_nbytes
from shmload._host.procfs import cgroup_limit_nbytes
from shmload._segments.listing import SegmentInfo
from shmload._wording import format_nbytes
from shmload.errors import SharedMemoryFull


def default_budget() -> int:
    """Return half of the smaller limit, /dev/shm or the memory control group, in bytes."""
    return min(_limits().values()) // 2


def budget_warnings(budget: int, resident: Iterable[SegmentInfo]) -> Iterator[str]:
    """Yield warnings for a budget that cannot be reached or is exceeded already.

    Args:
        budget: in bytes.
        resident: all segments at the start of the service.
    """
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


def choose_victims(
    resident: Iterable[SegmentInfo], nbytes: int, budget: int, room: int
) -> list[SegmentInfo]:
    """Choose what to evict so that `nbytes` more fit into the budget and into memory.

    Args:
        resident: all segments.
        nbytes: size of the new segments, in bytes.
        budget: in bytes.
        room: memory that is free without evicting anything, in bytes.

    Returns:
        Segments that are neither leased nor protected, least recently used first, and no more than
        needed. Whether memory then suffices is known only once they are removed.

    Raises:
        SharedMemoryFull: evicting all of them would still exceed the budget.
    """
    found = list(resident)
    over = sum(info.nbytes for info in found) + nbytes - budget
    excess = max(over, nbytes - room)
    victims: list[SegmentInfo] = []
    freed = 0
    for info in sorted(filter(may_go, found), key=lambda info: (info.used_at, info.name)):
        if freed >= excess:
            break
        victims.append(info)
        freed += info.nbytes
    if freed < over:
        available = max(0, nbytes - (over - freed))
        raise SharedMemoryFull(nbytes, available, "the service's budget", _remedy(found))
    return victims


def may_go(info: SegmentInfo) -> bool:
    """Tell whether a segment may be evicted to make room."""
    return not (info.is_leased or info.is_pinned)


def _remedy(found: Sequence[SegmentInfo]) -> str:
    """Return what the user can do about segments that cannot be evicted."""
    leased = sum(info.is_leased for info in found)
    protected = sum(info.is_pinned and not info.is_leased for info in found)
    ways = []
    if leased:
        ways.append(f"end the users of the {leased} in use (`shmload status`)")
    if protected:
        ways.append(f"remove some of the {protected} pinned with `shmload rm`")
    ways.append("raise `shmload serve --budget`")
    ways.append("load without the service, with SHMLOAD_SERVICE=off")
    return ", or ".join(ways)
