"""The /dev/shm of a soak: a small one of its own where the kernel allows it."""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

SHM = Path("/dev/shm")
_PREFIX = "shmload-"
_BALLAST = SHM / "soak-ballast"

# linux/sched.h and linux/mount.h
_CLONE_NEWNS = 0x00020000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18

# Longer than the minute for which `shmload gc` keeps a view without a lock.
_VIEW_AGE_S = 120


def take_own_shared_memory(nbytes: int) -> bool:
    """Mount a new tmpfs at /dev/shm for this process and its children; False if that fails."""
    libc = ctypes.CDLL(None)
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", 0, f"mode=1777,size={nbytes}".encode()) == 0
    )


def names() -> set[str]:
    """Return shmload's names in /dev/shm."""
    return {name for name in os.listdir(SHM) if name.startswith(_PREFIX)}


def age_views() -> None:
    """Make views look old.

    EXCLUDED: a view whose process was killed stays for a minute before `shmload gc` removes it.
    """
    then = time.time() - _VIEW_AGE_S
    for path in SHM.glob(f"{_PREFIX}*-view-*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (then, then))


@contextlib.contextmanager
def ballast(left_nbytes: int) -> Iterator[None]:
    """Fill shared memory inside the block, except `left_nbytes`."""
    found = os.statvfs(SHM)
    nbytes = found.f_bavail * found.f_frsize - left_nbytes
    fd = os.open(_BALLAST, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if nbytes > 0:
            with contextlib.suppress(OSError):  # another process took the room
                os.posix_fallocate(fd, 0, nbytes)
        yield
    finally:
        os.close(fd)
        _BALLAST.unlink()
