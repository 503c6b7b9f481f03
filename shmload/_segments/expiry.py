"""Segments that go when no process has used them for a time.

The header says how long (`keep_for`), the modification time when it was last used. Each load, `gc`
and a running service remove what is due, so no process has to wait for it. A process that ends by a
signal records no use: its segments count from when it attached them, unless they were seen in use.
"""

import logging
import os
import time

from shmload._host.linux import is_named, shm_open, shm_unlink, wait_lock
from shmload._host.procfs import mappers
from shmload._segments.mode import is_pinned
from shmload._segments.names import segment_names
from shmload._segments.segment import Segment
from shmload.errors import ShmloadError

logger = logging.getLogger(__name__)

# A listing holds each lock for a moment, and must not look like a use, in seconds.
_PATIENCE_S = 0.05


def remove_expired() -> list[str]:
    """Remove the segments that were idle for as long as they were to stay; return their names.

    One that is due but in use counts as used now. Pinned ones stay.
    """
    removed = list(filter(_remove_if_due, segment_names()))
    for name in removed:
        logger.info("removed %s, which was idle for its time", name)
    return removed


def find_expired() -> list[str]:
    """Return the names that `remove_expired` would remove; remove nothing."""
    return [name for name in segment_names() if _look(name, remove=False)]


def _remove_if_due(name: str) -> bool:
    return _look(name, remove=True)


def _look(name: str, *, remove: bool) -> bool:
    """Tell whether a segment is idle and due; remove it then if that is asked for."""
    try:
        fd = shm_open(name)
    except ShmloadError:  # another user's, or no descriptor is left: no reason for a load to fail
        return False
    if fd is None:
        return False
    with Segment(name, fd) as segment:
        if not _is_due(segment):
            return False
        is_free = wait_lock(fd, exclusive=True, timeout_s=_PATIENCE_S)
        if not is_free or mappers([segment.inode]):
            segment.touch()
            return False
        # Meanwhile a process may have used it and ended.
        is_over = is_named(fd, name) and _is_due(segment)
        if is_over and mappers([segment.inode]):
            segment.touch()
            return False
        if is_over and remove:
            shm_unlink(name)
        return is_over


def _is_due(segment: Segment) -> bool:
    keep_for_s = segment.keep_for_s
    found = os.fstat(segment.fd)
    if not keep_for_s or is_pinned(found):
        return False
    return time.time() - found.st_mtime >= keep_for_s
