"""Segments that go when no process has used them for a time.

The header says how long (`keep_for`), the modification time when it was last used. Each load, `gc`
and a running service remove what is due, so no process has to wait for it. A process that ends by a
signal records no use: its segments count from when it attached them, unless they were seen in use.
"""

import os
import time

from shmload._host.shm import shm_open
from shmload._segments.listing import segments_by_lock
from shmload._segments.names import segment_names
from shmload._segments.removal import find_idle, remove_idle
from shmload._segments.roots import model_names
from shmload._segments.segment import Segment
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)


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
