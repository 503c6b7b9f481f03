"""A /dev/shm of its own for a process and its children."""

import ctypes

# linux/sched.h and linux/mount.h
_CLONE_NEWNS = 0x00020000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18


def take_own_shared_memory(size: str = "50%") -> bool:
    """Mount a new tmpfs at /dev/shm for this process and its children; False if that fails.

    Args:
        size: of the tmpfs, as for mount(8).
    """
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"mode=1777,size={size}".encode()) == 0
    )
