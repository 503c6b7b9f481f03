"""The mode of a segment's file: two bits, which mean nothing else there, say how long it stays.

0400    resident: until it is evicted
0500    shared: its name is removed with its last lease
01400   pinned: resident, and never evicted to make room, nor because it is idle
01500   pinned for view directories alone: it loses the pin with the last one that needs it

Guarantee: a complete segment's mode is changed by one process at a time, and as a whole. So no
change is lost. A process that is killed while it publishes a segment, or writes into its header,
leaves it writable to its user; the next to attach it, or to change its mode, ends that.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator

from shmload._host.files import is_writable
from shmload._host.shm import SHM_DIR, reopen_to_map, reopen_to_write
from shmload._segments.names import mode_lock_name, name_prefix
from shmload._segments.turn import try_turn
from shmload.errors import SegmentTimeout

READ_ONLY = 0o400
SHARED = stat.S_IXUSR
PINNED = stat.S_ISVTX
FOR_VIEWS = PINNED | SHARED

_POLL_S = 0.005
# A change takes microseconds: only a process that was stopped in the middle takes longer.
_TIMEOUT_S = 10.0


def is_shared(found: os.stat_result) -> bool:
    """Tell whether a segment's name is removed with its last lease."""
    return found.st_mode & FOR_VIEWS == SHARED


def is_pinned(found: os.stat_result) -> bool:
    """Tell whether a segment is never evicted to make room, nor because it is idle."""
    return bool(found.st_mode & PINNED)


def is_for_views(found: os.stat_result) -> bool:
    """Tell whether a segment is pinned for view directories, and not by the user."""
    return found.st_mode & FOR_VIEWS == FOR_VIEWS


@contextlib.contextmanager
def changing_mode(what: str) -> Iterator[None]:
    """Be the one process that may change modes, inside the block.

    Args:
        what: the segment whose mode changes, or the view directory that needs it, for the error.

    Raises:
        SegmentTimeout: another process is in the middle of a change for 10 s.
        SharedMemoryFull: /dev/shm has no inodes left.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        with try_turn(mode_lock_name()) as is_mine:
            if is_mine:
                yield
                return
        if time.monotonic() >= deadline:
            raise SegmentTimeout(what, _TIMEOUT_S, "pinned or given a time to stay")
        time.sleep(_POLL_S)


def end_writing(fd: int, segment: str) -> None:
    """Make a complete segment read-only, if a process that was killed has left it writable.

    Args:
        fd: of the segment; a lease, so its builder is done with it.
        segment: its name.

    Raises:
        SegmentTimeout, SharedMemoryFull: as `changing_mode`.
    """
    if os.fstat(fd).st_mode & stat.S_IWUSR:
        with changing_mode(segment):
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~stat.S_IWUSR)


def overwrite(fd: int, content: bytes, offset: int) -> None:
    """Write into a complete segment; call it inside `changing_mode`."""
    writable = reopen_to_write(fd)
    try:
        os.pwrite(writable, content, offset)
    finally:
        os.close(writable)


def open_to_map(fd: int) -> int | None:
    """Return a descriptor of a segment from which a mapping can be made that may become writable.

    Drivers that register no read-only pages need one for a moment. Nothing may be written through
    it: the segment is complete.

    Args:
        fd: of any file; its builder's, or one of a process that attached it.

    Returns:
        The descriptor, the caller's; None if the file is no segment of this user.

    Raises:
        SegmentTimeout, SharedMemoryFull: as `changing_mode`.
    """
    if is_writable(fd):
        return os.dup(fd)
    path = os.readlink(f"/proc/self/fd/{fd}")
    if not path.startswith(f"{SHM_DIR}/{name_prefix()}") or os.fstat(fd).st_uid != os.geteuid():
        return None
    with changing_mode(os.path.basename(path).removesuffix(" (deleted)")):
        return reopen_to_map(fd)
