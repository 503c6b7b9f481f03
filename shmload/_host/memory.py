"""This process's addresses: what is mapped where, and which pages are there.

Python's mmap lacks these calls. `call` is how every function of the C library is called.
"""

import ctypes
import functools
import mmap
import os
from typing import Any

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
# What the module mmap lacks, see mmap(2).
_MAP_FIXED = 0x10
# linux/mman.h, since Linux 5.14
_MADV_POPULATE_READ = 22
# linux/falloc.h: FALLOC_FL_PUNCH_HOLE and _KEEP_SIZE.
_PUNCH = 0x02 | 0x01


def map_at(start: int, end: int, fd: int, offset: int) -> None:
    """Map a file copy-on-write at addresses that are reserved.

    Args:
        start: the first address, on a page.
        end: the address after the last.
        fd: the file; stays the caller's.
        offset: where it begins in the file, in bytes.

    Raises:
        OSError: the kernel refuses.
    """
    _mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset)


def populate(start: int, nbytes: int) -> bool:
    """Bring the pages of mapped memory into this process's page table, all at once.

    To read them one after the other makes a fault for each few. Memory that cannot be read is left
    alone: to touch it fails as it would have.

    Args:
        start: address of the first byte.
        nbytes: how many bytes.

    Returns:
        Whether the kernel did; it can since Linux 5.14.
    """
    first = start // PAGE_NBYTES * PAGE_NBYTES
    return call("madvise", *_memory(first, start + nbytes - first), _MADV_POPULATE_READ) == 0


def free_pages(fd: int, begin: int, end: int) -> None:
    """Free whole pages of a file in memory: they read as zeros from here on, where mapped too.

    Args:
        fd: the file, open for writing.
        begin: offset of the first byte.
        end: offset behind the last byte.

    Raises:
        OSError: the kernel refuses.
    """
    begin = -(-begin // PAGE_NBYTES) * PAGE_NBYTES
    size = ctypes.c_long(end - begin)
    if end > begin and (code := call("fallocate", fd, _PUNCH, ctypes.c_long(begin), size)):
        raise OSError(code, os.strerror(code))


def _mmap(start: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> None:
    """Call mmap(2) with MAP_FIXED, which Python's mmap cannot."""
    call = _c_library().mmap
    call.restype = ctypes.c_void_p
    where, length = _memory(start, nbytes)
    if call(where, length, protection, flags | _MAP_FIXED, fd, ctypes.c_long(offset)) != start:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _memory(start: int, nbytes: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(start), ctypes.c_size_t(nbytes)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library; returns its errno, or 0."""
    return ctypes.get_errno() if getattr(_c_library(), name)(*arguments) else 0


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
