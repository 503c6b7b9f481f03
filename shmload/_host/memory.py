"""This process's addresses: what is mapped where, and which pages are there.

Python's mmap lacks these calls. `call` is how every function of the C library is called.

Which pages this process has read or written, the kernel's page tables say. Linux 6.7 and later
answer by an ioctl, which looks for the first such page (PAGEMAP_SCAN, in the kernel's
admin-guide/mm/pagemap). Earlier ones are read page by page (proc_pid_pagemap(5)), which takes three
to four times as long.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
from typing import Any, NamedTuple

from shmload._host.procfs import Mapping

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
    call = _c_library().mmap  # Python's mmap has no MAP_FIXED
    call.restype = ctypes.c_void_p
    where, length = _memory(start, end - start)
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if call(where, length, access, flags, fd, ctypes.c_long(offset)) != start:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


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


def _memory(start: int, nbytes: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(start), ctypes.c_size_t(nbytes)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library; returns its errno, or 0."""
    return ctypes.get_errno() if getattr(_c_library(), name)(*arguments) else 0


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# `struct pm_scan_arg` of the kernel's uapi/linux/fs.h, and the number of the ioctl.
_SCAN_ARGUMENT = struct.Struct("12Q")
_PAGEMAP_SCAN = 0xC0606610
_NOT_KNOWN = (errno.ENOTTY, errno.EINVAL, errno.ENOSYS)


class _Kind(NamedTuple):
    """A kind of pages: the categories of the ioctl, and bits 61 to 63 of an entry."""

    without: int
    """Categories that no such page has."""
    any_of: int
    """Categories of which each such page has at least one."""
    entries: frozenset[int]


_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
# Bit 63 is "present", bit 62 "swapped", bit 61 "page is of a file".
_TOUCHED = _Kind(0, _PRESENT | _SWAPPED, frozenset({2, 3, 4, 5, 6, 7}))
_OWN = _Kind(_FILE, _PRESENT | _SWAPPED, frozenset({2, 4, 6}))


def is_touched(start: int, end: int) -> bool:
    """Tell whether this process may have touched a page that lies wholly in a range.

    Args:
        start: first address, in bytes.
        end: address after the last byte.
    """
    first, last = -(-start // PAGE_NBYTES), end // PAGE_NBYTES
    return first < last and _has_any(_TOUCHED, first, last)


def has_own_pages(start: int, end: int) -> bool:
    """Tell whether this process may have pages of its own in a private mapping of a file.

    The process wrote to these: they are no pages of the file any more. If a sandbox hides the
    answer, there may be some. It takes 10 ms for 1 GiB that was read here (2 cores; 0.1 ms if
    nothing was).

    Args:
        start: first address, in bytes, on a page.
        end: address after the last byte, on a page.
    """
    return _has_any(_OWN, start // PAGE_NBYTES, end // PAGE_NBYTES)


def is_modified(mapping: Mapping) -> bool:
    """Tell whether this process may have written to a private mapping of a file."""
    return has_own_pages(mapping.start, mapping.end)


def _has_any(kind: _Kind, first: int, last: int) -> bool:
    """Tell whether some pages, by number, may have one of a kind."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            try:
                return _scan(pagemap.fileno(), kind, first, last)
            except OSError as exc:
                if exc.errno not in _NOT_KNOWN:
                    raise
            pagemap.seek(first * 8)
            content = pagemap.read((last - first) * 8)
    except OSError:
        return True
    return len(content) < (last - first) * 8 or _is_listed(kind, content)


def _scan(pagemap: int, kind: _Kind, first: int, last: int) -> bool:
    """Ask the kernel for the first page of a kind.

    Raises:
        OSError: it does not answer; ENOTTY before Linux 6.7.
    """
    region = (ctypes.c_uint64 * 3)()
    argument = _SCAN_ARGUMENT.pack(
        _SCAN_ARGUMENT.size,
        0,  # flags
        first * PAGE_NBYTES,
        last * PAGE_NBYTES,
        0,  # where it ended, an answer
        ctypes.addressof(region),
        1,  # regions that there is room for
        1,  # pages after which to stop
        kind.without,  # inverted, and
        kind.without,  # asked for
        kind.any_of,
        kind.any_of,  # to be told of each region
    )
    regions: int = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(argument))
    return regions > 0


def _is_listed(kind: _Kind, content: bytes) -> bool:
    import numpy as np  # imported here: the parent needs numpy nowhere else

    kinds = np.frombuffer(content, np.uint64) >> 61
    return bool(np.isin(kinds, list(kind.entries)).any())
