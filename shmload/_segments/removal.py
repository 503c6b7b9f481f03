"""Removing segments and parts that no process holds, and those that were idle for their time.

The header says how long a segment stays idle (`keep_for`), the modification time when it was last
used. Each load, `gc` and a running service remove what is due, so no process has to wait for it. A
process that ends by a signal records no use: its segments count from when it attached them, unless
they were seen in use.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from shmload._host.descriptors import try_lock, unlock, wait_lock
from shmload._host.procfs import mappers
from shmload._host.shm import shm_unlink
from shmload._segments.listing import needing_by_segment, segments_by_lock
from shmload._segments.names import segment_names, unfinished_names
from shmload._segments.segment import Segment, attach, peek
from shmload._segments.view import remove_dead_views
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)


_LOCK_POLL_S = 0.02
# A listing holds a lock for microseconds; it may lose its core meanwhile.
LISTING_S = 1.0
# A process that removes segments holds their locks while it reads all mappings, in seconds.
_REMOVAL_S = 2.0
# Each takes a descriptor; for each batch the mappings of all processes are read.
_BATCH = 64

_T = TypeVar("_T")

Condition = Callable[[Segment], bool]
"""Tells of a segment whose lock is held whether it is to go."""


class Look(NamedTuple):
    """What a look at some segments has found; those that have gone meanwhile are left out."""

    idle: list[str]
    """No process holds or maps these, and they are to go."""
    used: list[str]
    """Some process of this user has a lease on these, or maps them."""
    locked: list[str]
    """Some process lists, builds or removes these."""


def give_back(*segments: Segment, wait_s: float = LISTING_S) -> None:
    """Close some segments, and remove the shared ones that no process holds any more.

    Args:
        segments: to be closed.
        wait_s: as for `remove_unused`.
    """
    names = [each.name for each in segments if each.fd >= 0 and each.is_shared]
    for segment in segments:
        segment.close()
    remove_unused(names, wait_s)


@contextlib.contextmanager
def attached(name: str) -> Iterator[Segment | None]:
    """Hold a lease on a segment inside the block; None if it is not there."""
    segment = attach(name)
    try:
        yield segment
    finally:
        if segment:
            give_back(segment)


def remove_leftovers() -> list[str]:
    """Remove what dead processes left: parts, shared segments, views. Return the names."""
    # No process lists parts, so a process that holds one is building it: do not wait.
    parts = [name for name in unfinished_names() if remove_if_free(name)]
    shared = [name for name in segment_names() if _ask(name, _is_shared)]
    return [
        *parts,
        # Under the lock: it may have been made resident meanwhile.
        *remove_idle(shared, patience_s=0, condition=_is_shared).idle,
        *remove_dead_views(),
    ]


def remove_idle(
    names: Sequence[str],
    patience_s: float = 0.2,
    *,
    condition: Condition = lambda segment: True,
    ignored: Collection[int] = (),
) -> Look:
    """Remove the segments that no process of this user holds or maps.

    A process that maps a segment without a lease keeps its memory, so the name stays too. While the
    mappings are read the locks are held, so no process attaches a segment meanwhile. What a load
    has built goes with the first of what it needs, unless it is pinned.

    Args:
        names: of the segments; a publication before what it needs.
        patience_s: how long to wait for their locks, in seconds; a listing holds each for a moment.
            If it is not 0, a process that removes some of them is waited for longer.
        condition: which of them are to go, whatever an earlier listing said.
        ignored: processes whose mappings do not count.

    Returns:
        What was found; the idle ones are removed.
    """
    look = Look([], [], [])
    for start in range(0, len(names), _BATCH):
        with _hold_free(names[start : start + _BATCH], patience_s, look) as held:
            going = list(filter(condition, held))
            mapped = mappers([segment.inode for segment in going])
            # Under the locks: nothing that needs one of them can be begun now.
            needing = needing_by_segment() if going else {}
            for segment in sorted(going, key=lambda each: names.index(each.name)):
                needed_by = needing.get(segment.name, {})
                if mapped.get(segment.inode, set()).difference(ignored) or (
                    _is_needed(needed_by, look.idle, patience_s, ignored)
                ):
                    look.used.append(segment.name)
                # A process that has waited for the lock for a second builds the segment anew. If
                # the mappings took longer than that, the name may lead to another one by now.
                elif segment.has_name:
                    look.idle.append(segment.name)
                    shm_unlink(segment.name)
    return look


def _is_needed(
    needed_by: Mapping[str, bool], gone: list[str], patience_s: float, ignored: Collection[int]
) -> bool:
    """Remove what loads have built over an idle segment; tell whether something still needs it.

    Args:
        needed_by: as `needing_by_segment` has it.
        gone: what is removed already, and gets the names of what is removed here.
        patience_s: as for `remove_idle`.
        ignored: likewise.
    """
    left = needed_by.keys() - gone
    if left and all(needed_by[name] for name in left):
        look = remove_idle(
            [*left], patience_s, condition=lambda segment: not segment.is_pinned, ignored=ignored
        )
        gone += look.idle
    return not left.issubset(gone)


def remove_if_free(name: str) -> bool:
    """Remove a part or segment unless a process holds it; return whether it was removed."""

    def remove(segment: Segment) -> bool:
        is_over = _is_free(segment)
        if is_over:
            shm_unlink(name)
        return is_over

    return bool(_ask(name, remove))


def remove_unused(names: Iterable[str], wait_s: float = LISTING_S) -> None:
    """Remove those of some shared segments that no process holds.

    A segment that has been made resident stays.

    Args:
        names: of the segments.
        wait_s: how long to wait for their locks, all together, in seconds. A listing holds a lock
            for a moment: without a wait, the last lease would leave the name behind.
    """
    deadline = time.monotonic() + wait_s

    def remove(segment: Segment) -> None:
        wait_lock(segment.fd, exclusive=False, timeout_s=deadline - time.monotonic())
        # flock drops the shared lock before it tries the exclusive one, so of several releasers the
        # last succeeds.
        if _is_free(segment) and segment.is_shared:
            shm_unlink(segment.name)

    for name in names:
        _ask(name, remove)


def is_free(name: str) -> bool:
    """Tell whether a segment or part exists and no process holds it."""
    return bool(_ask(name, _is_free))


def _is_free(segment: Segment) -> bool:
    """Take the exclusive lock of a segment or part if it is free and still has its name."""
    return try_lock(segment.fd, exclusive=True) and segment.has_name


@contextlib.contextmanager
def _hold_free(names: Iterable[str], patience_s: float, look: Look) -> Iterator[list[Segment]]:
    """Hold the exclusive locks of those segments that no process holds.

    Args:
        names: of the segments.
        patience_s: as for `remove_idle`.
        look: gets the names of the others.

    Yields:
        The segments.
    """
    with contextlib.ExitStack() as closing:
        waiting = [closing.enter_context(segment) for segment in filter(None, map(peek, names))]
        held: list[Segment] = []
        deadline = time.monotonic() + patience_s
        while True:
            now = time.monotonic()
            for segment in tuple(waiting):
                if try_lock(segment.fd, exclusive=True):
                    waiting.remove(segment)
                    held.append(segment)
                elif now >= deadline and try_lock(segment.fd, exclusive=False):
                    # It was a lease that kept the lock, unless a listing has just let go of it.
                    waiting.remove(segment)
                    if try_lock(segment.fd, exclusive=True):
                        held.append(segment)
                    else:
                        look.used.append(segment.name)
                        unlock(segment.fd)
            if not waiting or now >= deadline + (_REMOVAL_S if patience_s else 0):
                break
            time.sleep(_LOCK_POLL_S)
        look.locked.extend(segment.name for segment in waiting)
        yield [segment for segment in held if segment.has_name]


def remove_expired() -> list[str]:
    """Remove the segments that were idle for as long as they were to stay; return their names.

    One that is due but in use counts as used now. Pinned ones stay, and so does, until the next
    time, what another process lists or removes. If some are due, the mappings of this user's
    processes are read once: 0.1 to 1 ms for each process.
    """
    try:
        due = [name for name in segment_names() if _ask(name, _is_due)]
        if not due:
            return []
        known = {info.name: info for info in segments_by_lock()}
        look = remove_idle(due, patience_s=0, condition=_is_due)
        for name in look.used:
            _ask(name, Segment.touch)
    except (ShmloadError, OSError) as exc:  # no descriptor is left: no reason for a load to fail
        logger.warning("idle segments could not be looked at: %s", exc)
        return []
    for info in (known[name] for name in look.idle if name in known):
        of = info.model or "no model"
        logger.info("removed %s of %s, idle for its time", info.name, of)
    return look.idle


def _is_shared(segment: Segment) -> bool:
    return segment.is_shared


def _is_due(segment: Segment) -> bool:
    """Tell whether a segment's last use is as long ago as it is to stay."""
    keep_for_s = segment.keep_for_s
    if not keep_for_s or segment.is_pinned:
        return False
    return time.time() - os.fstat(segment.fd).st_mtime >= keep_for_s


def _ask(name: str, ask: Callable[[Segment], _T]) -> _T | None:
    """Return what a segment answers; None if it is not there, or another user's."""
    segment = peek(name)
    if segment is None:
        return None
    with segment:
        return ask(segment)
