"""How fast a file is read and a device is copied to, each measured in a second or less.

A file is read as one worker would read it; several together may read faster.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shmload._host.files import is_cached, open_source
from shmload._host.reading import READ_NBYTES, Facts, cached_part, choose_reading, examine
from shmload._runtimes import kinds
from shmload.workers.reader import Reader, Span, source_to_read

if TYPE_CHECKING:
    import torch

_SAMPLE_NBYTES = 256 << 20
_COPIES = 3
# The kernel may drop a page at any time.
_NEARLY = 0.99


class ReadSpeed(msgspec.Struct, frozen=True):
    """The result of reading a file."""

    nbytes: int
    elapsed_s: float
    was_cached: bool
    """Whether these bytes were in the page cache before."""
    facts: Facts
    """What decides how the file is read."""

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
    """Read the start of a file as a worker does; what it read may be in the page cache afterwards.

    Raises:
        ShardMissing: there is no such file.
        ShardUnreadable: it is not a regular file, or may not be read.
        FillError: it cannot be read, or was cut short.
    """
    with contextlib.ExitStack() as closing:
        fd = open_source(path)
        closing.callback(os.close, fd)
        nbytes = min(limit_nbytes, os.fstat(fd).st_size)
        was_cached = _seems_cached(fd, nbytes)
        facts = examine(fd)
        source = source_to_read(fd, choose_reading(facts, 1))
        was_cached &= source.direct_fd is None
        closing.callback(source.close_direct)
        reader = closing.enter_context(contextlib.closing(Reader()))
        spans = [
            Span(offset, min(READ_NBYTES, nbytes - offset))
            for offset in range(0, nbytes, READ_NBYTES)
        ]
        began_at = time.perf_counter()
        for _ in reader.read(source, spans):
            pass
        return ReadSpeed(nbytes, time.perf_counter() - began_at, was_cached, facts)


def is_file_cached(path: Path) -> bool:
    """Tell whether a whole file seems to be in the page cache.

    Raises:
        ShardMissing: there is no such file.
        ShardUnreadable: it is not a regular file, or may not be read.
    """
    fd = open_source(path)
    try:
        return _seems_cached(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _seems_cached(fd: int, nbytes: int) -> bool:
    """Tell whether the start of a file seems to be in the page cache."""
    part = cached_part(fd, nbytes)
    return is_cached(fd, nbytes) if part is None else part > _NEARLY


def measure_copies() -> list[CopySpeed]:
    """Copy to each accelerator; takes 256 MiB there and 512 MiB on the host, and imports torch.

    Returns:
        One entry per device; none if torch finds no device.

    Raises:
        ImportError, OSError: torch cannot be imported.
        RuntimeError: a device fails.
    """
    import torch

    from shmload._runtimes.generic import name_of

    names = kinds.accelerator_names()
    if not names:
        return []
    pageable = torch.ones(_SAMPLE_NBYTES, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    return [
        CopySpeed(
            name_of(torch.device(name)),
            _copy_speed(pageable, name),
            _copy_speed(pinned, name),
        )
        for name in names
    ]


def _copy_speed(source: "torch.Tensor", device: str) -> float:
    """Return the best of a few copies, in bytes per second."""
    synchronize = kinds.module_of(device.partition(":")[0]).synchronize
    target = source.to(device)  # wakes the device
    synchronize(device)
    fastest_s = float("inf")
    for _ in range(_COPIES):
        began_at = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - began_at)
    return source.nbytes / fastest_s
