"""Who closes an open file, and who has its lock.

Guarantee: one object closes a descriptor, once. A lock goes with the process that took it, and a
forked child keeps none that another thread than the forking one took.
"""

import fcntl
import os
import threading
import time
from typing import NamedTuple, Self

_LOCK_POLL_S = 0.02


class Inode(NamedTuple):
    """Identifies a file for as long as it exists."""

    device: int
    number: int


def inode_of(found: os.stat_result) -> Inode:
    """Return the inode of a file from its stat."""
    return Inode(found.st_dev, found.st_ino)


class Descriptor:
    """Owns one file descriptor; a context that closes it. The base of what owns an open file.

    A forked child has a descriptor of its own to the same open file: each closes its own, and a
    lock goes with the last.

    Args:
        fd: the descriptor; -1 for none.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """-1 when it was closed or taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def inode(self) -> Inode:
        """What names the file in /proc/self/maps."""
        return inode_of(os.fstat(self.fd))

    def take(self) -> int:
        """Return the descriptor, which the caller must close; -1 if there is none."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        # Forget the number first: the kernel gives it to the next file that is opened, and a second
        # close, from another thread or after an interrupt, would close that one.
        fd = self.take()
        if fd >= 0:
            close(fd)


def occupy_standard_streams() -> None:
    """Open /dev/null under each number from 0 to 2 that is closed, for good.

    Else a part would get such a number, and what a library writes to stderr would go into weights.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != number:  # another thread was quicker
                os.close(opened)


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take or change the lock of an open file; return whether it was taken; never waits.

    The kernel drops it with the last descriptor of the open file. flock, not fcntl's locks: those
    vanish when *any* descriptor of the file is closed. A forked child shares the lock, unless it is
    exclusive and another thread than the forking one took it.
    """
    if exclusive:
        _lockers[fd] = threading.get_ident()
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        _lockers.pop(fd, None)
        return False
    except BaseException:  # a file system without locks
        _lockers.pop(fd, None)
        raise
    if not exclusive:
        _lockers.pop(fd, None)
    return True


def wait_lock(fd: int, *, exclusive: bool, timeout_s: float) -> bool:
    """Take a lock within a deadline, in seconds; return whether it was taken.

    flock has no deadline, so this tries every 20 ms.
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOCK_POLL_S)
    return True


def unlock(fd: int) -> None:
    """Give up the lock of an open file."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    _lockers.pop(fd, None)


def close(fd: int) -> None:
    """Close a descriptor; give up its lock first if it is exclusive.

    A child that was forked before the lock was taken has the same open file, and would keep it.
    """
    try:
        if fd in _lockers:
            unlock(fd)
    finally:
        _lockers.pop(fd, None)
        os.close(fd)


# By descriptor: the thread that has an exclusive lock with it.
_lockers: dict[int, int] = {}


def _is_exclusive(fd: int) -> bool:
    try:
        with open(f"/proc/self/fdinfo/{fd}") as lines:
            return any("FLOCK" in line and "WRITE" in line for line in lines)
    except OSError:  # it is closed
        return False


def _leave_exclusive_locks() -> None:
    """Leave to the parent of a forked child the locks that its other threads hold.

    Else what a load was about to unlock by closing a file stays locked as long as the child lives.
    """
    here = threading.get_ident()
    locks = [fd for fd, locker in _lockers.items() if locker != here and _is_exclusive(fd)]
    if locks:
        # The numbers stay in use: nothing may get them that an object of these threads may close.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in locks:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
    # What the forking thread holds is shared: closed here, it stays the parent's.
    _lockers.clear()


os.register_at_fork(after_in_child=_leave_exclusive_locks)
