"""Removing segments and parts that no process holds, and those that were idle for their time.

The header says how long a segment stays idle (`keep_for`), the modification time when it was last
used. Each load, `gc` and a running service remove what is due, so no process has to wait for it. A
process that ends by a signal records no use: its segments count from when it attached them, unless
they were seen in use.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from shmload._host.descriptors import close, try_lock, unlock, wait_lock
from shmload._host.procfs import mappers
from shmload._host.shm import SHM_DIR, is_named, shm_open, shm_unlink
from shmload._segments.listing import segments_by_lock
from shmload._segments.names import part_names, segment_names
from shmload._segments.roots import model_names
from shmload._segments.segment import Segment, is_shared
from shmload._segments.view import remove_dead_views
from shmload._wording import logger_of
from shmload.errors import SegmentUntrusted, ShmloadError

logger = logger_of(__name__)


_LOCK_POLL_S = 0.02
# A process that removes segments holds their locks while it reads all mappings, in seconds.
_REMOVAL_S = 2.0
# Each takes a descriptor; for each batch the mappings of all processes are read.
_BATCH = 64

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


def give_back(segment: Segment) -> None:
    """Close a segment; remove it if it is shared and this was its last lease."""
    may_be_last = segment.fd >= 0 and segment.is_shared
    segment.close()
    if may_be_last:
        remove_if_unused(segment.name)


def remove_leftovers() -> list[str]:
    """Remove what dead processes left: parts, shared segments, views. Return the names."""
    # No process lists parts, so a process that holds one is building it: do not wait.
    parts = [name for name in part_names() if remove_if_free(name, patience_s=0)]
    shared = [name for name in segment_names() if _is_shared(name)]
    return [
        *parts,
        # Under the lock: it may have been made resident meanwhile.
        *remove_idle(shared, patience_s=0, condition=lambda segment: segment.is_shared).idle,
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
    mappings are read the locks are held, so no process attaches a segment meanwhile.

    Args:
        names: of the segments.
        patience_s: how long to wait for their locks, in seconds; a listing holds each for a moment.
            If it is not 0, a process that removes some of them is waited for longer.
        condition: which of them are to go, whatever an earlier listing said.
        ignored: processes whose mappings do not count.

    Returns:
        What was found; the idle ones are removed.
    """
    return _look(names, patience_s, condition, ignored, remove=True)


def find_idle(names: Sequence[str], *, condition: Condition) -> list[str]:
    """Return the names of those that `remove_idle` would remove; remove nothing."""
    return _look(names, 0.0, condition, (), remove=False).idle


def _look(
    names: Sequence[str],
    patience_s: float,
    condition: Condition,
    ignored: Collection[int],
    *,
    remove: bool,
) -> Look:
    look = Look([], [], [])
    for start in range(0, len(names), _BATCH):
        with _hold_free(names[start : start + _BATCH], patience_s, look) as held:
            going = list(filter(condition, held))
            mapped = mappers([segment.inode for segment in going])
            for segment in going:
                if mapped.get(segment.inode, set()).difference(ignored):
                    look.used.append(segment.name)
                # A process that has waited for the lock for a second builds the segment anew. If
                # the mappings took longer than that, the name may lead to another one by now.
                elif segment.has_name:
                    look.idle.append(segment.name)
                    if remove:
                        shm_unlink(segment.name)
    return look


def remove_if_free(name: str, patience_s: float = 0.2) -> bool:
    """Remove a part unless a process holds it; return whether it was removed.

    Args:
        name: of the part.
        patience_s: how long to wait for its lock, in seconds; a listing holds each for a moment.
    """
    with _hold(name, patience_s) as fd:
        if fd is not None:
            shm_unlink(name)
    return fd is not None


def remove_if_unused(name: str) -> bool:
    """Remove a shared segment unless a process holds it; return whether it was removed.

    A segment that has been made resident stays.
    """
    with _hold(name, patience_s=0) as fd:
        is_over = fd is not None and is_shared(os.fstat(fd))
        if is_over:
            shm_unlink(name)
    return is_over


def is_free(name: str) -> bool:
    """Tell whether a segment or part exists and no process holds it."""
    with _hold(name) as fd:
        return fd is not None


def _is_shared(name: str) -> bool:
    """Tell whether a segment is there and goes with its last lease."""
    try:
        return is_shared(os.stat(SHM_DIR / name, follow_symlinks=False))
    except FileNotFoundError:
        return False


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
        waiting: list[Segment] = []
        for name in names:
            with contextlib.suppress(SegmentUntrusted):
                fd = shm_open(name)
                if fd is not None:
                    waiting.append(closing.enter_context(Segment(name, fd)))
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


@contextlib.contextmanager
def _hold(name: str, patience_s: float = 0.2) -> Iterator[int | None]:
    """Hold the exclusive lock of a segment or part.

    Args:
        name: of the segment or part.
        patience_s: how long to wait for the lock, in seconds.

    Yields:
        Its descriptor; None if it does not exist or a process holds it.
    """
    try:
        fd = shm_open(name)
    except SegmentUntrusted:
        fd = None
    if fd is None:
        yield None
        return
    try:
        is_free = wait_lock(fd, exclusive=True, timeout_s=patience_s) and is_named(fd, name)
        yield fd if is_free else None
    finally:
        close(fd)


def remove_expired() -> list[str]:
    """Remove the segments that were idle for as long as they were to stay; return their names.

    One that is due but in use counts as used now. Pinned ones stay, and so does, until the next
    time, what another process lists or removes. If some are due, the mappings of this user's
    processes are read once: 0.1 to 1 ms for each process.
    """
    due = _due_names()
    known = {info.name: info for info in segments_by_lock()} if due else {}
    try:
        look = remove_idle(due, patience_s=0, condition=_is_due)
    except (ShmloadError, OSError) as exc:  # no descriptor is left: no reason for a load to fail
        logger.warning("idle segments could not be looked at: %s", exc)
        return []
    for name in look.used:
        _touch(name)
    names = model_names(info.source for info in known.values() if info.source)
    for name in look.idle:
        source = known[name].source if name in known else ""
        said = {"segment": name, "source": source, "model": names.get(source, name)}
        what = f"{said['model']}: {source}" if source else name
        logger.info("removed %s, which was idle for its time", what, extra=said)
    return look.idle


def find_expired() -> list[str]:
    """Return the names that `remove_expired` would remove; change nothing."""
    return find_idle(_due_names(), condition=_is_due)


def _due_names() -> list[str]:
    due = []
    for name in segment_names():
        segment = _open(name)
        if segment:
            with segment:
                if _is_due(segment):
                    due.append(name)
    return due


def _touch(name: str) -> None:
    segment = _open(name)
    if segment:
        with segment:
            segment.touch()


def _open(name: str) -> Segment | None:
    """Open a segment without a lease on it; return None if that is impossible."""
    try:
        fd = shm_open(name)
    except ShmloadError:  # another user's, or no descriptor is left
        return None
    return None if fd is None else Segment(name, fd)


def _is_due(segment: Segment) -> bool:
    """Tell whether a segment's last use is as long ago as it is to stay."""
    keep_for_s = segment.keep_for_s
    found = os.fstat(segment.fd)
    if not keep_for_s or segment.is_pinned:
        return False
    return time.time() - found.st_mtime >= keep_for_s
