"""Devices of CUDA, by torch's streams and events; torch gives ROCm's devices the same names."""

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shmload._devices.cuda_library import cuda_library
from shmload._devices.runtime import Event
from shmload._wording import logger_of

logger = logger_of(__name__)

# driver_types.h: cudaHostRegisterPortable, for all devices of the process, and -ReadOnly;
# cudaDevAttrHostRegisterReadOnlySupported; cudaErrorInvalidValue and -NotSupported.
_PORTABLE, _READ_ONLY = 0x01, 0x08
_TAKES_READ_ONLY = 113
_NO_READ_ONLY = (1, 801)
# CUDACachingAllocator.cpp: kMinBlockSize, to which sizes are rounded; kSmallSize: up to this size
# memory comes from blocks of 2 MiB.
_BLOCK_NBYTES, _SMALL_NBYTES = 512, 1 << 20


class CudaRuntime:
    """One CUDA device; each lane is a stream.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = torch.cuda.get_device_name(device)
        self.driver = _driver_version()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._consumer = torch.cuda.current_stream(device)
        self._registers_read_only: bool | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        nbytes = sum(_rounded(size) for size in sizes if size > _SMALL_NBYTES)
        if not nbytes or not _cuts_large_blocks() or self._unused_nbytes() >= nbytes:
            return
        with contextlib.suppress(torch.OutOfMemoryError):  # `empty` says what does not fit
            self.empty(nbytes)  # freed at once; the allocator keeps it for what comes next

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        with torch.cuda.stream(self._stream(lane)):
            target.copy_(source, non_blocking=True)

    def follow(self, lane: int) -> None:
        self._stream(lane).wait_stream(torch.cuda.current_stream(self.device))

    def join(self, lane: int) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream(lane))

    def record(self, lane: int) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(lane))
        return _CudaEvent(event)

    @property
    def registers_read_only(self) -> bool:
        if self._registers_read_only is None:
            library = cuda_library()
            found = library and library.attribute(_TAKES_READ_ONLY, self.device.index)
            self._registers_read_only = found != 0  # unknown: `register` finds out
        return self._registers_read_only

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        if read_only and not self.registers_read_only:
            return False
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with torch.cuda.device(self.device):
            error = int(_cudart().cudaHostRegister(address, nbytes, flags))
            if error == 0:
                return True
            self._clear_error()
        if read_only and error in _NO_READ_ONLY:
            logger.info("%s registers no read-only pages (error %d)", self.name, error)
            self._registers_read_only = False
        else:
            _say_once(f"the driver of {self.name} does not pin memory of the host (error {error})")
        return False

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            if int(_cudart().cudaHostUnregister(address)) != 0:
                self._clear_error()

    def pinned(self, nbytes: int) -> None:
        return None

    def _stream(self, lane: int) -> torch.cuda.Stream:
        if lane not in self._streams:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(self._consumer)
            self._streams[lane] = stream
        return self._streams[lane]

    def _unused_nbytes(self) -> int:
        """Return how much torch's allocator has for this device that is not in use, in bytes."""
        allocated = torch.cuda.memory_allocated(self.device)
        return torch.cuda.memory_reserved(self.device) - allocated

    def _clear_error(self) -> None:
        """Take the last error from the runtime, or the next kernel would be blamed for it."""
        if library := cuda_library():
            library.take_error()
            return
        try:  # torch takes the error for its own
            torch.zeros(1, device=self.device)
        except RuntimeError as exc:
            logger.debug("cleared: %s", exc)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES


def _cuts_large_blocks() -> bool:
    """Tell whether torch's allocator cuts free blocks of any size."""
    set_by = map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return (
        "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
        and not any("max_split_size_mb" in (value or "") for value in set_by)
        and torch.cuda.get_allocator_backend() == "native"
    )


def _driver_version() -> str:
    for module in ("nvidia", "amdgpu"):
        with contextlib.suppress(OSError):
            return Path(f"/sys/module/{module}/version").read_text().strip()
    return ""


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("%s; copies are slower without, and nothing else", reason)
