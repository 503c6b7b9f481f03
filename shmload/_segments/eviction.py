"""Room for segments: whether there is enough, and which go to make it.

Shared memory counts against the file system at /dev/shm, the machine, and the control group of the
process that touches a page first. The kernel kills processes of a group that exceeds its limit, so
it is checked before the first byte is read. The least recently used segments go first; leased and
pinned ones never. What went is told as a person thinks of it: by model.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from shmload._host.procfs import cgroup_free_nbytes, machine_free_nbytes
from shmload._host.shm import shm_free_nbytes, shm_total_nbytes, unwritten_nbytes, written_nbytes
from shmload._segments.listing import SegmentInfo, segments, segments_by_lock
from shmload._segments.models import find_models
from shmload._segments.names import part_names, segment_names
from shmload._segments.removal import remove_idle, remove_leftovers
from shmload._segments.roots import model_names
from shmload._wording import count_of, format_nbytes, logger_of
from shmload.errors import CapacityError, MemoryLimitExceeded, SharedMemoryFull

logger = logger_of(__name__)

# Left for page tables and the workers themselves (about 40 MB each).
_MARGIN_NBYTES = 64 << 20


class _Limit(NamedTuple):
    """One limit on segments; sizes in bytes."""

    error: type[CapacityError]
    free: int
    kept: int
    """How much of `free` is not for new segments."""
    name: str
    remedy: str
    """Empty for /dev/shm: what helps there depends on what lies there."""


def require_room(nbytes: int, *, evictable: int = 0) -> None:
    """Check that there is room for `nbytes` of new segments.

    Args:
        nbytes: size of the segments, in bytes.
        evictable: how many bytes could be evicted for them.

    Raises:
        SharedMemoryFull: the file system at /dev/shm is too small.
        MemoryLimitExceeded: the control group or the machine has too little memory.
    """
    if nbytes == 0:
        return
    for limit in _limits():
        free = limit.free + evictable
        if nbytes + limit.kept > free:
            remedy = limit.remedy or _shm_remedy(nbytes)
            raise limit.error(nbytes, max(0, free - limit.kept), limit.name, remedy)


def _shm_remedy(nbytes: int) -> str:
    """Return what gives room for `nbytes` in /dev/shm: what is shmload's, or others', or neither.

    What others have is named where shmload's own files would not free enough.
    """
    enlarge = (
        "enlarge it: `mount -o remount,size=90% /dev/shm`, `docker run --shm-size`, "
        "or an emptyDir of medium Memory"
    )
    total, free = shm_total_nbytes(), shm_free_nbytes()
    if nbytes > total:
        return f"all of it is {format_nbytes(total)}; {enlarge}"
    own = written_nbytes([*segment_names(), *part_names()])
    others = max(0, total - free - own)
    ways = ["free some with `shmload rm` or `shmload gc`"] if own else []
    if nbytes > free + own:
        ways.append(
            f"remove what others have there, {format_nbytes(others)} "
            "(`du -ah /dev/shm | sort -h | tail`)"
        )
    return ", or ".join([*ways, enlarge])


def room_nbytes() -> int:
    """Return the room for new segments, in bytes; negative if the margin is used already."""
    return min(limit.free - limit.kept for limit in _limits())


def _limits(*, of_group: bool = True) -> Iterator[_Limit]:
    promised = unwritten_nbytes(part_names())  # to the parts of other loads
    yield _Limit(
        SharedMemoryFull,
        max(0, shm_free_nbytes() - promised),
        0,
        "/dev/shm",
        "",  # `_shm_remedy` looks at the files there
    )
    group_free = cgroup_free_nbytes() if of_group else None
    if group_free is not None:
        yield _Limit(
            MemoryLimitExceeded,
            group_free,
            promised + _MARGIN_NBYTES,
            "the memory control group",
            "raise the container's memory limit",
        )
    yield _Limit(
        MemoryLimitExceeded,
        machine_free_nbytes(),
        promised + _MARGIN_NBYTES,
        "the machine's memory",
        "free some with `shmload rm` or stop a process",
    )


class Budget(msgspec.Struct, frozen=True):
    """A limit for resident segments."""

    nbytes: int
    """What may be resident, in bytes."""
    name: str
    """What sets it, for errors."""
    ways: tuple[str, ...]
    """How a user can get around it, for errors."""


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
        nbytes: size of the new segments, in bytes.
        room: memory that is free without evicting anything, in bytes.
        budget: limit for resident segments; None for memory alone.
        reserved: how much of the budget is for other segments to come, in bytes.

    Returns:
        Segments that are neither leased nor pinned, least recently used first, and no more than
        needed. Whether memory then suffices is known only once they are removed.

    Raises:
        SharedMemoryFull: evicting all of them would still exceed the budget.
    """
    found = list(resident)
    over = 0
    if budget:
        over = sum(info.nbytes for info in found) + reserved + nbytes - budget.nbytes
    excess = max(over, nbytes - room)
    victims: list[SegmentInfo] = []
    freed = 0
    for info in evictable(found):
        if freed >= excess:
            break
        victims.append(info)
        freed += info.nbytes
    if budget and freed < over:
        available = max(0, nbytes - (over - freed))
        remedy = _remedy(found, nbytes, over - freed, budget)
        raise SharedMemoryFull(nbytes, available, budget.name, remedy, most=budget.nbytes)
    return victims


def evictable(found: Iterable[SegmentInfo]) -> list[SegmentInfo]:
    """Return the segments that may be evicted to make room, in the order in which they should go.

    That is the least recently used first. What a publication or a built object needs is used when
    that is, and goes after it.

    Args:
        found: all segments.
    """
    # Who needs a segment is made after it: from the last to the first.
    from_last = sorted(found, key=lambda info: info.created_at, reverse=True)
    last_use: dict[str, float] = {}
    for info in from_last:
        users = (last_use.get(each, 0.0) for each in info.needed_by)
        last_use[info.needs_as] = last_use[info.name] = max([info.used_at, *users])
    going: list[SegmentInfo] = []
    gone: set[str] = set()
    for info in sorted(from_last, key=lambda info: (last_use[info.name], len(info.needed_by))):
        if not (info.is_leased or info.is_pinned) and gone.issuperset(info.needed_by):
            going.append(info)
            gone.add(info.needs_as)
    return going


def _remedy(found: Iterable[SegmentInfo], nbytes: int, missing: int, budget: Budget) -> str:
    """Return what can help a load that the budget refuses.

    Args:
        found: all segments.
        nbytes: size of the new segments, in bytes.
        missing: how much of what stays would have to go for them, in bytes.
        budget: what refuses them.
    """
    ways = ", or ".join(budget.ways)
    if nbytes > budget.nbytes:
        return f"the load is larger than the whole budget of {format_nbytes(budget.nbytes)}: {ways}"
    going = {info.name for info in evictable(found)}
    staying = [info for info in found if info.name not in going]
    leased = [info for info in staying if info.is_leased]
    pinned = [info for info in staying if info.is_pinned]
    end = f"end processes that use models (`shmload ls`: {count_of(len(leased), 'segment')} in use)"
    unpin = f"unpin models (`shmload unpin`: {count_of(len(pinned), 'segment')} pinned)"
    alone = [
        way
        for way, freed in (
            (end, sum(info.nbytes for info in leased if not info.is_pinned)),
            (unpin, sum(info.nbytes for info in pinned if not info.is_leased)),
        )
        if freed >= missing
    ]
    if alone:
        return ", or ".join([*alone, ways])
    both = [way for way, of in ((end, leased), (unpin, pinned)) if of]
    return ", or ".join([" and ".join(both), ways]) if both else ways


def evict_for(nbytes: int, budget: Budget | None = None, reserved: int = 0) -> list[SegmentInfo]:
    """Evict enough for `nbytes` of new segments, or nothing if that is impossible.

    Args:
        nbytes: size of the new segments, in bytes.
        budget: as for `choose_victims`.
        reserved: as for `choose_victims`.

    Returns:
        The segments that were removed.

    Raises:
        CapacityError: leased and pinned segments, or other processes, leave too little room.
    """
    evicted: list[SegmentInfo] = []
    taken: set[str] = set()
    looks_at_mappings = False  # not before something must go: it takes 0.1 s
    while True:
        listed = segments() if looks_at_mappings else segments_by_lock()
        found = [
            msgspec.structs.replace(info, is_leased=info.is_leased or info.name in taken)
            for info in listed
        ]
        room = room_nbytes()
        if room < nbytes and remove_leftovers():
            room = room_nbytes()
        victims = choose_victims(found, nbytes, room, budget, reserved)
        if victims and not looks_at_mappings:
            looks_at_mappings = True
            continue
        idle_nbytes = sum(info.nbytes for info in evictable(found))
        require_room(nbytes, evictable=idle_nbytes)
        names = [info.name for info in victims]
        removed = {*remove_idle(names, condition=lambda segment: not segment.is_pinned).idle}
        gone = [info for info in victims if info.name in removed]
        _log_eviction(gone, found)
        evicted += gone
        if len(gone) == len(victims):
            require_room(nbytes)
            return evicted
        # A process has attached or mapped one of the victims meanwhile.
        taken |= {info.name for info in victims} - {info.name for info in gone}


def _log_eviction(gone: Sequence[SegmentInfo], found: Sequence[SegmentInfo]) -> None:
    """Log what went of all that was there, by the names that the models had."""
    if not gone or not logger.isEnabledFor(logging.INFO):
        return
    names = model_names(info.source for info in found if info.source)
    for info in gone:
        model = names.get(info.source, info.name)
        size = format_nbytes(info.nbytes)
        logger.info("evicted %s of %s: %s", size, model, info.source)


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or the part of one, that was evicted to make room."""

    model: str
    """Its name, as `shmload ls` shows it."""
    dtype: str
    """torch's name of the dtype of the weights that went."""
    components: tuple[str, ...]
    """The components that went, the largest first; empty for a model without components."""
    nbytes: int
    """How much went, in bytes."""
    segments: tuple[str, ...]
    """Names of the segments that went."""

    def __str__(self) -> str:
        what = f"{self.model} ({self.dtype})" if self.dtype else self.model
        parts = f": {', '.join(self.components)}" if self.components else ""
        return f"evicted {what}{parts}, {format_nbytes(self.nbytes)}, for room"


def group_evicted(
    gone: Sequence[SegmentInfo], resident: Iterable[SegmentInfo] = ()
) -> tuple[Evicted, ...]:
    """Group the segments that went by the models that they were part of.

    Args:
        gone: the segments that went.
        resident: those that stay, whose models have names too.
    """
    names = model_names(info.source for info in (*gone, *resident) if info.source)
    return tuple(
        Evicted(
            model=names.get(model.segments[0].source, model.name),
            dtype=model.dtype,
            components=model.components,
            nbytes=model.nbytes,
            segments=tuple(info.name for info in model.segments),
        )
        for model in find_models(gone)
    )
