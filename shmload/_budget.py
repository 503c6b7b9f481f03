"""How much may be resident, and what goes when it becomes too much: plain functions on values."""

from collections.abc import Iterable, Sequence

from shmload._errors import SharedMemoryFull
from shmload._linux import shm_total_nbytes
from shmload._procfs import cgroup_limit_nbytes
from shmload._residency import SegmentInfo


def default_budget() -> int:
    """Return half of what /dev/shm and the control group allow, in bytes."""
    limits = [shm_total_nbytes(), cgroup_limit_nbytes()]
    return min(limit for limit in limits if limit is not None) // 2


def choose_victims(resident: Iterable[SegmentInfo], nbytes: int, budget: int) -> list[SegmentInfo]:
    """Choose what to evict so that `nbytes` more fit into the budget.

    Args:
        resident: all segments.
        nbytes: what is to come, in bytes.
        budget: in bytes.

    Returns:
        Segments that nobody is attached to and nobody has pinned, least recently used first, and no
        more of them than needed.

    Raises:
        SharedMemoryFull: not even all of those would do.
    """
    found = list(resident)
    excess = sum(info.nbytes for info in found) + nbytes - budget
    victims: list[SegmentInfo] = []
    for info in sorted(filter(_may_go, found), key=lambda info: (info.used_at, info.name)):
        if excess <= 0:
            break
        victims.append(info)
        excess -= info.nbytes
    if excess > 0:
        raise SharedMemoryFull(
            nbytes, max(0, nbytes - excess), "the service's budget", _remedy(found)
        )
    return victims


def _may_go(info: SegmentInfo) -> bool:
    return not (info.is_leased or info.is_pinned)


def _remedy(found: Sequence[SegmentInfo]) -> str:
    stays = sum(not _may_go(info) for info in found)
    return (
        f"{stays} segments are in use or pinned; end their users or raise `shmload serve --budget`"
    )
