"""Which way to feed a device is the quickest on this machine: measured once, then remembered."""

import contextlib
import hashlib
import logging
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from shmload._decoding.ring import Ring, ring_shape
from shmload._host.files import replacing
from shmload._host.linux import inode_of
from shmload._settings import settings
from shmload.integrations._devices.destination import Pin
from shmload.integrations._devices.moves import Moves
from shmload.integrations._devices.pinned import PinnedRing
from shmload.integrations._devices.registered import copy_registered
from shmload.integrations._devices.runtime import Runtime
from shmload.integrations._devices.upload import filler_count, upload

logger = logging.getLogger(__name__)

_MEASURED: tuple[Pin, ...] = ("ring", "register")
# Enough for what it costs to begin not to matter.
_SAMPLE_NBYTES = 256 << 20


def choose_pin(pin: Pin, runtime: Runtime, sample_nbytes: int = _SAMPLE_NBYTES) -> Pin:
    """Return how to feed a device.

    Args:
        pin: what is wanted. For `auto` it is measured, the first time on a machine.
        runtime: of the device.
        sample_nbytes: how much is copied for that, in bytes.
    """
    if pin != "auto":
        return pin
    path = _memory_path(runtime)
    with contextlib.suppress(OSError):
        remembered = path.read_text()
        for known in _MEASURED:
            if remembered == known:
                return known
    try:
        found = _measure(runtime, sample_nbytes)
    except torch.OutOfMemoryError:  # little is free there; another time, perhaps
        return "ring"
    _remember(path, found)
    return found


def _memory_path(runtime: Runtime) -> Path:
    facts = f"{runtime.name}, Linux {platform.release()}, torch {torch.__version__}"
    digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    return settings().cache_dir / "pins" / digest


def _remember(path: Path, pin: Pin) -> None:
    """Write it so that a reader sees all or nothing; failing to is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(pin.encode())


def _measure(runtime: Runtime, nbytes: int) -> Pin:
    """Copy a sample in both ways, twice: the first time of each pays for what comes only once."""
    with _sample(nbytes) as (module, fd):
        ways: dict[Pin, Callable[[], bool]] = {
            "ring": lambda: _by_ring(module, runtime),
            "register": lambda: _registered(module, runtime, fd),
        }
        elapsed_s = {}
        for pin, copy in ways.items():
            took_s = []
            for _ in range(2):
                began = time.perf_counter()
                if copy():
                    took_s.append(time.perf_counter() - began)
            if len(took_s) == 2:
                elapsed_s[pin] = min(took_s)
    found = min(elapsed_s, key=lambda pin: elapsed_s[pin])
    speeds = ", ".join(f"{pin} {nbytes / s / 1e9:.1f} GB/s" for pin, s in elapsed_s.items())
    logger.info("%s is fed by %s from now on (%s)", runtime.name, found, speeds)
    return found


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


def _by_ring(module: nn.Module, runtime: Runtime) -> bool:
    shape = ring_shape(filler_count())
    with Ring(shape) as ring, PinnedRing(ring, runtime) as pinned:
        upload(Moves([(module, lambda path: runtime)]).staged, shape, pinned)
    return True


def _registered(module: nn.Module, runtime: Runtime, fd: int) -> bool:
    staged = Moves([(module, lambda path: runtime)]).staged
    return not copy_registered(staged, [(inode_of(os.fstat(fd)), fd)])
