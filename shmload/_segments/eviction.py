"""Room for segments: whether there is enough, and which go to make it.

Shared memory counts against the file system at /dev/shm, the machine, and the control group of the
process that touches a page first. The kernel kills processes of a group that exceeds its limit, so
it is checked before the first byte is read. The least recently used segments go first; leased and
pinned ones never.
"""

import errno
from collections.abc import Iterable, Iterator

import msgspec

from shmload._host.procfs import cgroup_free_nbytes, machine_free_nbytes
from shmload._host.shm import (
    lack_of_room,
    no_room,
    shm_free_nbytes,
    shm_total_nbytes,
    unwritten_nbytes,
)
from shmload._segments.listing import SegmentInfo, segments, segments_by_lock
from shmload._segments.names import part_names
from shmload._segments.removal import remove_idle, remove_leftovers
from shmload._settings import settings, worker_count
from shmload._wording import format_nbytes, logger_of
from shmload.errors import CapacityError, MemoryLimitExceeded, SharedMemoryFull

logger = logger_of(__name__)

# Left for page tables and the like.
_MARGIN_NBYTES = 64 << 20
# Left for each worker, which takes 18 to 20 MiB of its own while it decodes.
_WORKER_NBYTES = 20 << 20


class Budget(msgspec.Struct, frozen=True):
    """A limit for resident segments."""

    nbytes: int
    """What may be resident, in bytes."""
    name: str
    """What sets it, for errors."""
    remedy: str
    """How a user can raise it, for errors."""


def require_room(nbytes: int, *, evictable: int = 0, has_name: bool = True) -> None:
    """Check that there is room for `nbytes` of new segments.

    Args:
        nbytes: size of the segments, in bytes.
        evictable: how many bytes could be evicted for them.
        has_name: whether they lie in /dev/shm.

    Raises:
        SharedMemoryFull: the file system at /dev/shm is too small.
        MemoryLimitExceeded: the control group or the machine has too little memory.
    """
    for error, room, limit, remedy in _limits(nbytes, has_name=has_name) if nbytes else ():
        left = max(0, room + evictable)
        if nbytes > left:
            raise error(
                lack_of_room(nbytes, left, limit, remedy),
                needed=nbytes,
                available=left,
                limit=limit,
                errno=errno.ENOSPC,
            )


def room_nbytes(nbytes: int = 0, *, has_name: bool = True) -> int:
    """Return the room for new segments, in bytes; negative if the margin is used already.

    Args:
        nbytes: size of the segments, which decides whether workers need memory too.
        has_name: whether they lie in /dev/shm.
    """
    return min(room for _, room, _, _ in _limits(nbytes, has_name=has_name))


def _limits(nbytes: int, *, has_name: bool) -> Iterator[tuple[type[CapacityError], int, str, str]]:
    """Yield each limit on segments: its error, the room for new ones, its name and the remedy."""
    promised = unwritten_nbytes(part_names())  # to the parts of other loads
    if has_name:
        yield (
            SharedMemoryFull,
            shm_free_nbytes() - promised,
            "/dev/shm",
            "free some with `shmload rm` or `shmload gc`; or remove what others have there (`du "
            f"-ah /dev/shm | sort -h | tail`); or enlarge it, {format_nbytes(shm_total_nbytes())}: "
            "`mount -o remount,size=90% /dev/shm`, `docker run --shm-size`, or an emptyDir of "
            "medium Memory",
        )
    is_inline = nbytes <= settings().inline_nbytes
    workers = 0 if is_inline else worker_count(parent_is_busy=False)
    kept = promised + _MARGIN_NBYTES + workers * _WORKER_NBYTES
    of_group = cgroup_free_nbytes()
    if of_group is not None:
        remedy = "raise the container's memory limit"
        yield MemoryLimitExceeded, of_group - kept, "the memory control group", remedy
    remedy = "free some with `shmload rm` or stop a process"
    yield MemoryLimitExceeded, machine_free_nbytes() - kept, "the machine's memory", remedy


def choose_victims(
    resident: Iterable[SegmentInfo],
    nbytes: int,
    room: int,
    budget: Budget | None = None,
    reserved: int = 0,
) -> list[SegmentInfo]:
    """Choose what to evict so that `nbytes` more fit into the budget and into memory.

    Args:
        resident: all segments.
        nbytes: size of the new segments, in bytes; 0 to keep to the budget alone.
        room: memory that is free without evicting anything, in bytes.
        budget: limit for resident segments; None for memory alone.
        reserved: how much of the budget is for other segments to come, in bytes.

    Returns:
        Segments that are neither leased nor pinned, least recently used first, and no more than
        needed. Whether memory then suffices is known only once they are removed.

    Raises:
        SharedMemoryFull: the new segments exceed the budget, whatever is evicted.
    """
    found = list(resident)
    over = 0
    if budget:
        over = sum(info.nbytes for info in found) + reserved + nbytes - budget.nbytes
    excess = max(over, nbytes - room) if nbytes else over  # what is idle may stay in little memory
    victims: list[SegmentInfo] = []
    freed = 0
    for info in evictable(found):
        if freed >= excess:
            break
        victims.append(info)
        freed += info.nbytes
    if budget and nbytes and freed < over:
        available = max(0, nbytes - (over - freed))
        ways = (
            "end processes that use models (`shmload ls`), or unpin models (`shmload unpin`), or "
            if nbytes <= budget.nbytes
            else f"the load is larger than the whole budget of {format_nbytes(budget.nbytes)}: "
        )
        raise no_room(nbytes, available, budget.name, ways + budget.remedy)
    return victims


def evictable(found: Iterable[SegmentInfo]) -> list[SegmentInfo]:
    """Return the segments that may be evicted to make room, in the order in which they should go.

    That is the least recently used first. What a publication or a built object needs is used when
    that is, and goes after it.

    Args:
        found: all segments.
    """
    free = (info for info in found if not (info.is_leased or info.is_pinned))
    waiting = sorted(free, key=lambda info: info.used_at)
    going: list[SegmentInfo] = []
    gone: set[str] = set()
    while info := next((each for each in waiting if gone.issuperset(each.needed_by)), None):
        waiting.remove(info)
        going.append(info)
        gone.add(info.needs_as)
    return going


def evict_for(
    nbytes: int, budget: Budget | None = None, reserved: int = 0, *, has_name: bool = True
) -> list[SegmentInfo]:
    """Evict enough for `nbytes` of new segments, or nothing if that is impossible.

    Args:
        nbytes: size of the new segments, in bytes.
        budget: as for `choose_victims`.
        reserved: as for `choose_victims`.
        has_name: whether the new segments lie in /dev/shm.

    Returns:
        The segments that were removed.

    Raises:
        CapacityError: leased and pinned segments, or other processes, leave too little room.
    """
    evicted: list[SegmentInfo] = []
    taken: set[str] = set()
    looks_at_mappings = False  # not before something must go: it takes 0.1 s
    while True:
        found = [
            msgspec.structs.replace(info, is_leased=info.is_leased or info.name in taken)
            for info in (segments() if looks_at_mappings else segments_by_lock())
        ]
        room = room_nbytes(nbytes, has_name=has_name)
        if room < nbytes and remove_leftovers():
            room = room_nbytes(nbytes, has_name=has_name)
        victims = choose_victims(found, nbytes, room, budget, reserved)
        if victims and not looks_at_mappings:
            looks_at_mappings = True
            continue
        could_go = sum(info.nbytes for info in evictable(found))
        require_room(nbytes, evictable=could_go, has_name=has_name)
        names = [info.name for info in victims]
        removed = {*remove_idle(names, condition=lambda segment: not segment.is_pinned).idle}
        for info in victims:
            if info.name in removed:
                evicted.append(info)
                size, of = format_nbytes(info.nbytes), info.model or "no model"
                logger.info("evicted %s of %s: %s", size, of, info.source)
        if removed.issuperset(names):
            require_room(nbytes, has_name=has_name)
            return evicted
        # A process has attached or mapped one of the victims meanwhile.
        taken |= {*names} - removed
