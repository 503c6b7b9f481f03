"""A name in /dev/shm that is there only while a process holds its lock: one at a time has its turn.

Guarantee: a process that dies gives its turn back. The name that it leaves goes as a dead process's
part does.
"""

import contextlib
from collections.abc import Iterator

from shmload._host.descriptors import close, try_lock
from shmload._host.shm import is_named, shm_open, shm_unlink


@contextlib.contextmanager
def try_turn(name: str) -> Iterator[bool]:
    """Hold the lock of a name inside the block, if it is free; never wait.

    Args:
        name: one that `_segments.names` makes for this.

    Yields:
        Whether this process has the turn.

    Raises:
        SegmentUntrusted: the name belongs to another user.
        SharedMemoryFull: /dev/shm has no inodes left.
    """
    fd = shm_open(name, create=True, writable=True)
    assert fd is not None, "created if missing"
    try:
        # Between open and lock its holder may have removed it.
        is_mine = try_lock(fd, exclusive=True) and is_named(fd, name)
        try:
            yield is_mine
        finally:
            if is_mine:
                shm_unlink(name)
    finally:
        close(fd)
