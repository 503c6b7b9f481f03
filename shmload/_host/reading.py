"""How a file is read: as it is asked for, or ahead; through the page cache, or past it.

That follows from where the file lies and what of it is in the page cache. What the kernel does not
tell is unknown, and never an error. A worker imports this module, so it imports only what is light.
"""

import contextlib
import mmap
import os
from typing import NamedTuple

READ_NBYTES = 1 << 20
"""What is read at a time, in bytes; the most that FUSE and NFS ask for in one request."""
MAX_READERS = 32
"""Most reads that a worker has under way."""

# A process that loads 5.5 GB of a virtual disk (2 cores, n=5, 2026-11-29): no read ahead 4.2 to 8.8
# s, one 4.2 to 8.4 s, four 3.7 to 4.9 s. FUSE, 5 ms a request: 16 reads 0.30 GB/s, past the page
# cache 1.06.
_READERS = 4
# Smaller files are read before a choice would gain anything.
_LEAST_NBYTES = 4 * READ_NBYTES
_MOSTLY = 0.5
_IN_MEMORY = ("tmpfs", "ramfs")
# asm-generic/unistd.h, which all architectures share since Linux 5.0; cachestat came with 6.5.
_SYS_CACHESTAT = 451


class Reading(NamedTuple):
    """An open file, and how it is read: by default when bytes are needed."""

    fd: int
    """Stays with the one who opened it."""
    readers: int = 0
    """Reads that are under way while a worker decodes; 0: it reads when it needs the bytes."""
    direct_fd: int | None = None
    """The same file, opened for reads past the page cache (O_DIRECT)."""
    is_past_cache: bool = False
    """Whether all reads go past it; else only if copies from there take long."""

    def close(self) -> None:
        """Close the second descriptor, if there is one."""
        if self.direct_fd is not None:
            os.close(self.direct_fd)


def choose_reading(fd: int, workers: int) -> Reading:
    """Choose how one worker reads a file; close what is returned.

    Args:
        fd: descriptor of a regular file; stays the caller's.
        workers: number of workers that read at the same time, at least 1.

    Raises:
        OSError: the descriptor is none.
    """
    # Not at the top: it imports ctypes, and a worker that waits for its first shard is ready.
    from shmload._host.procfs import file_system, is_remote

    found = os.fstat(fd)
    kind = file_system(found.st_dev)
    # The pages of a file on overlayfs belong to the file below.
    cached = None if kind == "overlay" else cached_part(fd, found.st_size)
    if found.st_size < _LEAST_NBYTES or kind in _IN_MEMORY or (cached or 0) >= _MOSTLY:
        return Reading(fd)
    if is_remote(kind):
        # Requests take long: as many as a worker may have hide that. FUSE fills the page cache by
        # 128 KiB a request, with 12 under way in a whole mount.
        return Reading(fd, max(_READERS, MAX_READERS // workers), open_direct(fd), True)
    return Reading(fd, _READERS, open_direct(fd))


def open_direct(fd: int) -> int | None:
    """Open a file again for reads past the page cache; None if its file system has none.

    Returns:
        A descriptor, the caller's. Offsets, sizes and addresses must be multiples of a page.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


def cached_part(fd: int, nbytes: int) -> float | None:
    """Return the part of a file's start that is in the page cache, 0 to 1; None if it is hidden.

    Args:
        fd: descriptor of the file.
        nbytes: how much of the file, in bytes.
    """
    if nbytes == 0:
        return 1.0
    from ctypes import c_uint64  # as in `choose_reading`

    from shmload._host.memory import call

    # struct cachestat_range: offset and length; struct cachestat: five numbers, of which the first
    # is that of the cached pages.
    part, counts = (c_uint64 * 2)(0, nbytes), (c_uint64 * 5)()
    with contextlib.suppress(AttributeError):  # a C library without it
        if call("syscall", _SYS_CACHESTAT, fd, part, counts, 0) == 0:
            return min(1.0, float(counts[0]) / -(-nbytes // mmap.PAGESIZE))
    return None
