"""How much may be resident, and what goes when it becomes too much: plain functions on values."""

from collections.abc import Iterable, Iterator, Sequence

from shmload._host.linux import shm_total_nbytes
from shmload._host.procfs import cgroup_limit_nbytes
from shmload._segments.listing import SegmentInfo
from shmload._wording import format_nbytes
from shmload.errors import SharedMemoryFull


def default_budget() -> int:
    """Return half of what /dev/shm and the control group allow, in bytes."""
    return min(_limits().values()) // 2


def budget_warnings(budget: int, resident: Iterable[SegmentInfo]) -> Iterator[str]:
    """Say what of a budget will not be kept to as one might expect.

    Args:
        budget: in bytes.
        resident: all segments when the service starts.
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
            f"{format_nbytes(budget)}; the rest goes when something is decoded"
        )


def _limits() -> dict[str, int]:
    """Return what bounds all segments together, in bytes."""
    limits = {"/dev/shm": shm_total_nbytes(), "the memory control group": cgroup_limit_nbytes()}
    return {name: limit for name, limit in limits.items() if limit is not None}


def choose_victims(
    resident: Iterable[SegmentInfo], nbytes: int, budget: int, room: int
) -> list[SegmentInfo]:
    """Choose what to evict so that `nbytes` more fit into the budget, and into the memory.

    Args:
        resident: all segments.
        nbytes: what is to come, in bytes.
        budget: in bytes.
        room: how much can be made without evicting anything, in bytes.

    Returns:
        Segments that nobody is attached to and nobody has pinned, least recently used first, and no
        more of them than needed. Whether they make room enough in the memory is not known before
        they are gone.

    Raises:
        SharedMemoryFull: not even all of those would do for the budget.
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
    """Say what helps: only what can."""
    leased = sum(info.is_leased for info in found)
    pinned = sum(info.is_pinned and not info.is_leased for info in found)
    ways = []
    if leased:
        ways.append(f"end the users of the {leased} in use (`shmload status`)")
    if pinned:
        ways.append(f"remove some of the {pinned} pinned with `shmload rm`")
    ways.append("raise `shmload serve --budget`")
    ways.append("load without the service, with SHMLOAD_SERVICE=off")
    return ", or ".join(ways)
