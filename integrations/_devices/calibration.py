"""Which way to feed a device is the quickest: measured once on a machine, then remembered."""

import contextlib
import hashlib
import logging
import mmap
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from shmload._decoding.ring import Ring
from shmload._host.files import replacing
from shmload._host.linux import inode_of
from shmload._settings import settings
from shmload.integrations._devices.moves import Moves
from shmload.integrations._devices.runtime import Runtime
from shmload.integrations._devices.upload import upload_shape
from shmload.integrations._devices.way import Way
from shmload.integrations._devices.ways import DEFAULT, WAYS, Pin, measured_ways

logger = logging.getLogger(__name__)

# Large enough that what it costs to start a copy does not matter.
_SAMPLE_NBYTES = 256 << 20


def choose_way(
    pin: Pin, runtime: Runtime, *, may_measure: bool = True, sample_nbytes: int = _SAMPLE_NBYTES
) -> Way:
    """Return the way to feed a device.

    Args:
        pin: a way's name; or `auto` for the quickest, measured the first time on a machine.
        runtime: of the device.
        may_measure: whether the sample may take memory of the host. If not, `auto` is `DEFAULT`.
        sample_nbytes: size of the sample, in bytes.
    """
    if pin != "auto":
        return WAYS[pin]()
    if not may_measure:
        return WAYS[DEFAULT]()
    path = _memory_path(runtime)
    ways = measured_ways()
    remembered = _recall(path)
    for way in ways:
        if way.name == remembered:
            return way
    try:
        quickest = _measure(ways, runtime, sample_nbytes)
    except torch.OutOfMemoryError:  # the device is nearly full now; a later load measures
        return WAYS[DEFAULT]()
    _remember(path, quickest)
    return quickest


def _memory_path(runtime: Runtime) -> Path:
    facts = f"{runtime.name}, Linux {platform.release()}, torch {torch.__version__}"
    digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    return settings().cache_dir / "pins" / digest


def _recall(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None


def _remember(path: Path, way: Way) -> None:
    """Write a way's name in one step; a file that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(way.name.encode())


def _measure(ways: list[Way], runtime: Runtime, nbytes: int) -> Way:
    """Return the way that copies a sample quickest.

    Each way copies it twice, and its quicker run counts: the first one pays for what happens once.
    """
    elapsed_s: dict[str, float] = {}
    with _sample(nbytes) as (module, fd):
        for way in ways:
            if reason := way.why_not(runtime):
                logger.info("%s is not fed by %s: %s", runtime.name, way.name, reason)
                continue
            runs = [_time_copy(way, module, fd, runtime) for _ in range(2)]
            took_s = [run for run in runs if run is not None]
            if len(took_s) == len(runs):
                elapsed_s[way.name] = min(took_s)
    quickest = min(elapsed_s, key=lambda name: elapsed_s[name])
    speeds = ", ".join(f"{name} {nbytes / s / 1e9:.1f} GB/s" for name, s in elapsed_s.items())
    logger.info("%s is fed by %s from now on (%s)", runtime.name, quickest, speeds)
    return WAYS[quickest]()


def _time_copy(way: Way, module: nn.Module, fd: int, runtime: Runtime) -> float | None:
    """Copy the sample and return the seconds it took; None if the way could not copy it itself."""
    began = time.perf_counter()
    with Ring(upload_shape()) as ring, way.open(ring, runtime) as copier:
        staged = Moves([(module, lambda path: runtime)]).staged
        left = copier.copy(staged, [(inode_of(os.fstat(fd)), fd)])
    return None if left else time.perf_counter() - began


@contextlib.contextmanager
def _sample(nbytes: int) -> Iterator[tuple[nn.Module, int]]:
    """Yield a module with one tensor in a private mapping of shared memory, and its descriptor."""
    fd = os.memfd_create("shmload-sample", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        mapped = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        module = nn.Module()
        module.register_buffer("sample", torch.frombuffer(mapped, dtype=torch.uint8))
        yield module, fd
    finally:
        os.close(fd)
