"""Finds out what decides how a file is read: where it lies, and how long a read takes.

Guarantee: a file that is in the page cache is not read. Of another one three reads of 1 MiB are
made. What the kernel does not tell is unknown, and never an error.
"""

import contextlib
import ctypes
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path

from shmload._host.procfs import file_system
from shmload._host.reading import READ_NBYTES, Facts, is_as_fast_as_memory, is_at_hand

# asm-generic/unistd.h, which all architectures share since Linux 5.0; cachestat came with 6.5.
_SYS_CACHESTAT = 451
_SAMPLES = 3
# What was timed is read again to be decoded. Of a smaller file three reads would be a large part.
_LARGE_NBYTES = 64 << 20


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def examine(fd: int) -> Facts:
    """Find out what decides how a file is read; reads 1 or 3 MiB of it unless it is in memory.

    Args:
        fd: descriptor of a regular file; stays the caller's.

    Raises:
        OSError: the descriptor is none.
    """
    found = os.fstat(fd)
    place = file_system(found.st_dev)
    facts = Facts(
        nbytes=found.st_size,
        kind=place.kind if place else "",
        is_remote=place is not None and place.is_remote,
        is_rotational=is_rotational(found.st_dev),
        # The pages of a file on overlayfs belong to the file below.
        cached=None if place and place.kind == "overlay" else cached_part(fd, found.st_size),
    )
    if is_at_hand(facts):
        return facts
    return _measured(fd, facts)


def _measured(fd: int, facts: Facts) -> Facts:
    """Return the facts with the time of a read, past the page cache if the file system can."""
    if facts.cached is None:
        # Past the page cache would tell nothing of what is in it.
        facts = replace(facts, read_s=_time_reads(fd, facts.nbytes))
        if is_as_fast_as_memory(facts.read_s):
            return facts
    direct = open_direct(fd)
    if direct is not None:
        try:
            read_s = _time_reads(direct, facts.nbytes)
        finally:
            os.close(direct)
        if read_s is not None:
            return replace(facts, has_direct=True, read_s=read_s)
    return facts if facts.read_s else replace(facts, read_s=_time_reads(fd, facts.nbytes))


def _time_reads(fd: int, nbytes: int) -> float | None:
    """Return the shortest time of some reads, in seconds; None if one fails or is short."""
    shortest_s: float | None = None
    with mmap.mmap(-1, READ_NBYTES) as buffer:  # on a page, as O_DIRECT needs it
        samples = _SAMPLES if nbytes >= _LARGE_NBYTES else 1
        for sample in range(samples):
            # Not at the start, which was read with the header.
            offset = nbytes * (sample + 1) // (samples + 1) // READ_NBYTES * READ_NBYTES
            began_at = time.perf_counter()
            try:
                got = os.preadv(fd, [buffer], offset)
            except OSError:
                return None
            if got < READ_NBYTES:
                return None
            elapsed_s = time.perf_counter() - began_at
            shortest_s = elapsed_s if shortest_s is None else min(shortest_s, elapsed_s)
    return shortest_s


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
    counts, start = _Counts(), _Range(0, nbytes)
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        call = ctypes.CDLL(None, use_errno=True).syscall
        if call(_SYS_CACHESTAT, fd, ctypes.byref(start), ctypes.byref(counts), 0) == 0:
            return min(1.0, float(counts.cached) / -(-nbytes // mmap.PAGESIZE))
    return None


def is_rotational(device: int, root: Path = Path("/sys/dev/block")) -> bool:
    """Tell whether the kernel says that a disk turns; false if it does not know the device."""
    folder = root / f"{os.major(device)}:{os.minor(device)}"
    for queue in (folder / "queue", folder / ".." / "queue"):  # a disk's own, or its partition's
        with contextlib.suppress(OSError):
            return (queue / "rotational").read_text().strip() == "1"
    return False
