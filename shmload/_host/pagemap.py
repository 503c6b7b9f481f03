"""Which pages of its mappings this process has read or written, as the kernel's page tables say.

Linux 6.7 and later answer by an ioctl, which looks for the first such page (PAGEMAP_SCAN, in the
kernel's admin-guide/mm/pagemap). Earlier ones are read page by page (proc_pid_pagemap(5)), which
takes three to four times as long.
"""

import ctypes
import errno
import fcntl
import struct
from typing import NamedTuple

from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import Mapping

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
