"""How a file is read: as it is asked for, or ahead; through the page cache, or past it.

`examine` finds out what decides that: where the file lies, and how long a read takes. A file that
is in the page cache is not read. Of another one three reads of 1 MiB are made. What the kernel does
not tell is unknown, and never an error.

A worker imports this module, so it imports only what is light.
"""

import contextlib
import mmap
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

READ_NBYTES = 1 << 20
"""What is read at a time, in bytes; the most that FUSE and NFS ask for in one request."""

# A worker converts 2.6 GB/s (fp32 to bf16): reading faster than this gains nothing.
_ENOUGH_BYTES_PER_S = 2.5e9
# From here on, keeping a file in the page cache costs more than reading it again.
_FAST_BYTES_PER_S = 1e9
# No disk answers one reader at this rate; the page cache does.
_MEMORY_BYTES_PER_S = 4e9
# On a busy machine two reads leave the disk idle: 1.3 to 2.0 GB/s, four 1.7 to 2.3, eight the same.
_LEAST_READERS = 4
MAX_READERS = 32
"""Most reads that a worker has under way."""
# Smaller files are read before a choice would gain anything.
_LEAST_NBYTES = 4 * READ_NBYTES
_MOSTLY = 0.5
_IN_MEMORY = ("tmpfs", "ramfs")
# asm-generic/unistd.h, which all architectures share since Linux 5.0; cachestat came with 6.5.
_SYS_CACHESTAT = 451
_SAMPLES = 3
# What was timed is read again to be decoded. Of a smaller file three reads would be a large part.
_LARGE_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known about a file and the place where it lies."""

    nbytes: int
    """Size of the file, in bytes."""
    kind: str = ""
    """Type of its file system, such as `ext4`; empty if it is unknown."""
    is_remote: bool = False
    """Whether it is a network or user-space file system."""
    is_rotational: bool = False
    """Whether the kernel says that its disk turns."""
    cached: float | None = None
    """The part of it that is in the page cache, 0 to 1; None if the kernel does not tell."""
    has_direct: bool = False
    """Whether it can be read past the page cache."""
    read_s: float | None = None
    """How long a read of `READ_NBYTES` takes that finds nothing in the page cache, in seconds, past
    the page cache if it can be; None if it was not measured."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a file is read."""

    readers: int
    """Reads that are under way while a worker decodes; 0: it reads when it needs the bytes."""
    is_direct: bool
    """Whether they pass the page cache by (O_DIRECT)."""
    why: str
    """The reason, for people."""


PLAIN = Reading(0, False, "nothing was examined")
"""Read when bytes are needed, through the page cache, with the kernel's own read-ahead."""


def is_at_hand(facts: Facts) -> bool:
    """Tell whether a file need not be measured: it is small, or in memory already."""
    is_cached = facts.cached is not None and facts.cached >= _MOSTLY
    return facts.nbytes < _LEAST_NBYTES or facts.kind in _IN_MEMORY or is_cached


def is_as_fast_as_memory(read_s: float | None) -> bool:
    """Tell whether a read of `READ_NBYTES` through the page cache, in seconds, found them there."""
    return read_s is not None and read_s * _MEMORY_BYTES_PER_S <= READ_NBYTES


def choose_reading(facts: Facts, workers: int) -> Reading:
    """Choose how one worker reads a file.

    Args:
        facts: what is known about the file.
        workers: number of workers that read at the same time, at least 1.
    """
    if is_at_hand(facts):
        if facts.nbytes < _LEAST_NBYTES:
            return Reading(0, False, "the file is small")
        return Reading(0, False, "it is in memory")
    if facts.read_s is None:
        return Reading(0, False, "a first read failed")
    if is_as_fast_as_memory(facts.read_s) and not facts.has_direct:
        return Reading(0, False, "it answers as fast as memory")
    took = f"a read of 1 MiB took {facts.read_s * 1000:.1f} ms"
    is_slow = facts.read_s * _FAST_BYTES_PER_S > READ_NBYTES
    if facts.is_rotational and is_slow and not facts.is_remote:
        # A second reader would make the heads seek; the kernel reads ahead for this one.
        return Reading(1, False, f"{took} on a disk that turns")
    together = -(-_ENOUGH_BYTES_PER_S * facts.read_s // READ_NBYTES)
    readers = max(_LEAST_READERS, -(-min(MAX_READERS, int(together)) // workers))
    if facts.is_remote and facts.has_direct:
        # FUSE fills the page cache by 128 KiB a request, with 12 under way in a whole mount.
        return Reading(readers, True, f"{took} from a remote file system")
    if is_slow:
        return Reading(readers, False, f"{took}: the page cache saves the next load that")
    if facts.has_direct:
        return Reading(readers, True, f"{took}: faster than filling the page cache")
    return Reading(readers, False, took)


# Finding out --------------------------------------------------------------------------------------


def examine(fd: int) -> Facts:
    """Find out what decides how a file is read; reads 1 or 3 MiB of it unless it is in memory.

    Args:
        fd: descriptor of a regular file; stays the caller's.

    Raises:
        OSError: the descriptor is none.
    """
    # Not at the top: it imports ctypes, and a worker that waits for its first shard is ready.
    from shmload._host.procfs import file_system

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
    from ctypes import c_uint64  # as in `examine`

    from shmload._host.memory import call

    # struct cachestat_range: offset and length; struct cachestat: five numbers, of which the first
    # is that of the cached pages.
    part, counts = (c_uint64 * 2)(0, nbytes), (c_uint64 * 5)()
    with contextlib.suppress(AttributeError):  # a C library without it
        if call("syscall", _SYS_CACHESTAT, fd, part, counts, 0) == 0:
            return min(1.0, float(counts[0]) / -(-nbytes // mmap.PAGESIZE))
    return None


def is_rotational(device: int, root: Path = Path("/sys/dev/block")) -> bool:
    """Tell whether the kernel says that a disk turns; false if it does not know the device."""
    folder = root / f"{os.major(device)}:{os.minor(device)}"
    for queue in (folder / "queue", folder / ".." / "queue"):  # a disk's own, or its partition's
        with contextlib.suppress(OSError):
            return (queue / "rotational").read_text().strip() == "1"
    return False
