"""Devices of CUDA: the generic runtime, and memory of the host that the driver pins.

Torch gives ROCm's devices the same names. ROCm has the functions below under other names; its
attributes have other numbers, so they are not asked for.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from shmload._compat import has_cuda_context
from shmload._host import nvml
from shmload._host.procfs import mapped_library
from shmload._runtimes.generic import GenericRuntime
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


class CudaRuntime(GenericRuntime):
    """One CUDA device; each lane is a stream.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._registers_read_only: bool | None = None

    @staticmethod
    def free_without_context(indices: Iterable[int]) -> dict[int, int]:
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        without = [index for index in indices if not (is_used and has_cuda_context(index))]
        # The properties take no context. Torch before 2.5 has no UUID among them.
        found = {index: torch.cuda.get_device_properties(index) for index in without}
        uuids = {index: str(each.uuid) for index, each in found.items() if hasattr(each, "uuid")}
        free = nvml.free_nbytes(uuids.values()) if uuids else {}
        return {index: free[uuid] for index, uuid in uuids.items() if uuid in free}

    def reserve(self, sizes: Sequence[int]) -> None:
        nbytes = sum(_rounded(size) for size in sizes if size > _SMALL_NBYTES)
        if not nbytes or not _cuts_large_blocks() or self._unused_nbytes() >= nbytes:
            return
        with contextlib.suppress(torch.OutOfMemoryError):  # `empty` says what does not fit
            self.empty(nbytes)  # freed at once; the allocator keeps it for what comes next

    @property
    def registers_read_only(self) -> bool:
        if self._registers_read_only is None:
            found = None if (library := _library()) is None else _takes_read_only(*library, self)
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
            self.clear_error()
        if read_only and error in _NO_READ_ONLY:
            logger.info("%s registers no read-only pages (error %d)", self.name, error)
            self._registers_read_only = False
        else:
            _say_once(f"the driver of {self.name} does not pin memory of the host (error {error})")
        return False

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            if int(_cudart().cudaHostUnregister(address)) != 0:
                self.clear_error()

    def pinned(self, nbytes: int) -> None:
        return None

    def clear_error(self) -> None:
        """Take the last error from the runtime, or the next kernel would be blamed for it.

        Torch does: other packages, such as torchvision, bring runtimes with errors of their own.
        """
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError as exc:
            logger.debug("cleared: %s", exc)

    # Torch has had these before those of all kinds of devices.

    def _require_streams(self, device: torch.device) -> None:
        pass

    def _new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _using(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def _new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def _driver_version(self) -> str:
        for module in ("nvidia", "amdgpu"):
            with contextlib.suppress(OSError):
                return Path(f"/sys/module/{module}/version").read_text().strip()
        return ""

    def _unused_nbytes(self) -> int:
        """Return how much torch's allocator has for this device that is not in use, in bytes."""
        allocated = torch.cuda.memory_allocated(self.device)
        return torch.cuda.memory_reserved(self.device) - allocated


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


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@functools.cache
def _library() -> tuple[ctypes.CDLL, str] | None:
    """Return the library that torch has loaded, for what torch does not show of it.

    In some of torch's packages its file's name has a digest in it: `libcudart-d0da41ae.so.11.0`.

    Returns:
        It, and what the names of its functions begin with; None if it is a part of another one.
    """
    for stem, prefix in (("libcudart", "cuda"), ("libamdhip64", "hip")):
        if path := mapped_library(stem):
            with contextlib.suppress(OSError):  # the file was replaced since
                return ctypes.CDLL(path), prefix
    return None


def _takes_read_only(library: ctypes.CDLL, prefix: str, runtime: CudaRuntime) -> int | None:
    """Return the attribute of a device that says so; None if the library does not know it."""
    if prefix != "cuda":
        return None
    value = ctypes.c_int(-1)
    index = runtime.device.index
    if library.cudaDeviceGetAttribute(ctypes.byref(value), _TAKES_READ_ONLY, index) != 0:
        runtime.clear_error()
        return None
    return value.value


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("%s; copies are slower without, and nothing else", reason)
