"""Removing segments and parts that no process holds."""

import contextlib
import os
from collections.abc import Iterator

from shmload._host.linux import is_named, shm_open, shm_unlink, wait_lock
from shmload._segments.names import part_names, segment_names
from shmload._segments.segment import Segment, is_shared
from shmload._segments.view import remove_dead_views
from shmload.errors import SegmentUntrusted


def give_back(segment: Segment) -> None:
    """Close a segment; remove it if it is shared and this was its last lease."""
    may_be_last = segment.fd >= 0 and segment.is_shared
    segment.close()
    if may_be_last:
        remove_if_unused(segment.name)


def remove_leftovers() -> list[str]:
    """Remove what dead processes left: parts, shared segments, views. Return the names."""
    # No process lists parts, so a process that holds one is building it: do not wait.
    parts = (name for name in part_names() if remove_if_free(name, patience_s=0))
    return [*parts, *filter(remove_if_unused, segment_names()), *remove_dead_views()]


def remove_if_free(name: str, patience_s: float = 0.2) -> bool:
    """Remove a segment or part unless a process holds it; return whether it was removed.

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
