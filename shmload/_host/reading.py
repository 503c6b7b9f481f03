"""How a file is read: as it is asked for, or ahead; through the page cache, or past it.

A worker imports this module, so it imports only what is light.
"""

from dataclasses import dataclass

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
