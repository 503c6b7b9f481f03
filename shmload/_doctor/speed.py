"""How fast a file is read and a device is copied to, each measured in a second or less.

Reads one block after the other on one thread, as one worker does; several together read faster.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shmload._host.linux import is_cached, open_source

if TYPE_CHECKING:
    import torch

_SAMPLE_NBYTES = 256 << 20
# As much as a worker reads at a time.
_BLOCK_NBYTES = 1 << 20
_COPIES = 3


class ReadSpeed(msgspec.Struct, frozen=True):
    """The result of reading a file."""

    nbytes: int
    elapsed_s: float
    was_cached: bool
    """Whether these bytes were in the page cache before."""

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.elapsed_s


class CopySpeed(msgspec.Struct, frozen=True):
    """The speed of copies from the host to a device."""

    device: str
    """Its name, such as `NVIDIA H200`."""
    pageable_bytes_per_s: float
    """From ordinary memory."""
    pinned_bytes_per_s: float
    """From memory that is locked for the device."""


def measure_reading(path: Path, limit_nbytes: int = _SAMPLE_NBYTES) -> ReadSpeed:
    """Read the start of a file, with `pread` as workers do; it is in the page cache afterwards.

    Raises:
        ShardMissing: there is no such file.
        ShardUnreadable: it is not a regular file, or may not be read.
    """
    fd = open_source(path)
    try:
        limit_nbytes = min(limit_nbytes, os.fstat(fd).st_size)
        was_cached = is_cached(fd, limit_nbytes)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = memoryview(bytearray(_BLOCK_NBYTES))
        done = 0
        began_at = time.perf_counter()
        while done < limit_nbytes:
            got = os.preadv(fd, [block[: limit_nbytes - done]], done)
            if got == 0:
                break  # the file was truncated
            done += got
        return ReadSpeed(done, time.perf_counter() - began_at, was_cached)
    finally:
        os.close(fd)


def is_file_cached(path: Path) -> bool:
    """Tell whether a whole file seems to be in the page cache.

    Raises:
        ShardMissing: there is no such file.
        ShardUnreadable: it is not a regular file, or may not be read.
    """
    fd = open_source(path)
    try:
        return is_cached(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def measure_copies() -> list[CopySpeed]:
    """Copy to each CUDA device; takes 256 MiB there and 512 MiB on the host, and imports torch.

    Returns:
        One entry per device; none if torch finds no device.

    Raises:
        ImportError, OSError: torch cannot be imported.
        RuntimeError: a device fails.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    pageable = torch.ones(_SAMPLE_NBYTES, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    return [
        CopySpeed(
            torch.cuda.get_device_name(number),
            _copy_speed(pageable, f"cuda:{number}"),
            _copy_speed(pinned, f"cuda:{number}"),
        )
        for number in range(torch.cuda.device_count())
    ]


def _copy_speed(source: "torch.Tensor", device: str) -> float:
    """Return the best of a few copies, in bytes per second."""
    import torch

    target = source.to(device)  # wakes the device
    torch.cuda.synchronize(device)
    fastest_s = float("inf")
    for _ in range(_COPIES):
        began_at = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - began_at)
    return source.nbytes / fastest_s
