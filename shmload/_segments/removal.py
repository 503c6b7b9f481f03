"""Removing segments and parts that no process holds."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence

from shmload._host.linux import (
    SHM_DIR,
    inode_of,
    is_named,
    shm_open,
    shm_unlink,
    try_lock,
    wait_lock,
)
from shmload._host.procfs import mappers
from shmload._segments.mode import is_pinned, is_shared
from shmload._segments.names import part_names, segment_names
from shmload._segments.segment import Segment
from shmload._segments.view import remove_dead_views
from shmload.errors import SegmentUntrusted

_LOCK_POLL_S = 0.02
# Each takes a descriptor; for each batch the mappings of all processes are read.
_BATCH = 64


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
        *remove_idle(shared, patience_s=0, only_shared=True),
        *remove_dead_views(),
    ]


def remove_idle(
    names: Sequence[str],
    patience_s: float = 0.2,
    *,
    only_shared: bool = False,
    spare_pinned: bool = False,
) -> list[str]:
    """Remove the segments that no process of this user holds or maps; return their names.

    A process that maps a segment without a lease keeps its memory, so the name stays too. While the
    mappings are read the locks are held, so no process attaches a segment meanwhile.

    Args:
        names: of the segments.
        patience_s: how long to wait for their locks, in seconds; a listing holds each for a moment.
        only_shared: leave those that have been made resident.
        spare_pinned: leave those that are pinned now, whatever an earlier listing said.
    """
    removed = []
    for start in range(0, len(names), _BATCH):
        with _hold_free(names[start : start + _BATCH], patience_s) as held:
            inodes = {
                name: inode_of(found)
                for name, found in held.items()
                if (is_shared(found) or not only_shared) and not (is_pinned(found) and spare_pinned)
            }
            mapped = mappers(inodes.values())
            for name, inode in inodes.items():
                if inode not in mapped:
                    shm_unlink(name)
                    removed.append(name)
    return removed


def remove_if_free(name: str, patience_s: float = 0.2) -> bool:
    """Remove a segment or part unless a process holds it; return whether it was removed.

    It does not look for processes that only map it, as `remove_idle` does.

    Args:
        name: of the segment or part.
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
def _hold_free(names: Iterable[str], patience_s: float) -> Iterator[dict[str, os.stat_result]]:
    """Hold the exclusive locks of those segments that no process holds; yields their states."""
    with contextlib.ExitStack() as closing:
        waiting: dict[str, int] = {}
        for name in names:
            with contextlib.suppress(SegmentUntrusted):
                fd = shm_open(name)
                if fd is not None:
                    closing.callback(os.close, fd)
                    waiting[name] = fd
        held = {}
        deadline = time.monotonic() + patience_s
        while True:
            for name, fd in list(waiting.items()):
                if try_lock(fd, exclusive=True):
                    del waiting[name]
                    if is_named(fd, name):
                        held[name] = os.fstat(fd)
            if not waiting or time.monotonic() >= deadline:
                break
            time.sleep(_LOCK_POLL_S)
        yield held


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
        os.close(fd)
