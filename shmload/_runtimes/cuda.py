"""Devices of CUDA: their streams, free memory, and memory of the host that the driver registers.

Torch gives ROCm's devices and functions the same names.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from shmload._compat import has_cuda_context
from shmload._runtimes.runtime import Runtime, logger, say_once

# driver_types.h: cudaHostRegisterPortable, for all devices of the process, and -ReadOnly.
_PORTABLE, _READ_ONLY = 0x01, 0x08
# CUDACachingAllocator.cpp: kMinBlockSize, to which sizes are rounded; kSmallSize: up to this size
# memory comes from blocks of 2 MiB.
_BLOCK_NBYTES, _SMALL_NBYTES = 512, 1 << 20
_LIBRARY = "libnvidia-ml.so.1"
# A GPU, or a part of one that is a device of its own (MIG).
_KINDS = ("GPU", "MIG")


class CudaRuntime(Runtime):
    """One CUDA device."""

    @staticmethod
    def free_without_context(indices: Iterable[int]) -> dict[int, int]:
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        without = [index for index in indices if not (is_used and has_cuda_context(index))]
        # The properties take no context. Torch before 2.5 has no UUID among them.
        found = {index: torch.cuda.get_device_properties(index) for index in without}
        uuids = {index: str(each.uuid) for index, each in found.items() if hasattr(each, "uuid")}
        free = free_nbytes(uuids.values()) if uuids else {}
        return {index: free[uuid] for index, uuid in uuids.items() if uuid in free}

    def reserve(self, sizes: Sequence[int]) -> None:
        nbytes = sum(_rounded(size) for size in sizes if size > _SMALL_NBYTES)
        if not nbytes or not _cuts_large_blocks() or self._unused_nbytes() >= nbytes:
            return
        with contextlib.suppress(torch.OutOfMemoryError):  # `empty` says what does not fit
            self.empty(nbytes)  # freed at once; the allocator keeps it for what comes next

    @property
    def is_integrated(self) -> bool:
        return bool(torch.cuda.get_device_properties(self.device).is_integrated)

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with torch.cuda.device(self.device):
            error = int(_cudart().cudaHostRegister(address, nbytes, flags))
            if error == 0:
                return True
            self.clear_error()
        pages = "read-only pages" if read_only else "memory of the host"
        say_once(f"the driver of {self.name} does not register {pages} (error {error})")
        return False

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            if int(_cudart().cudaHostUnregister(address)) != 0:
                self.clear_error()

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


# NVIDIA's management library ----------------------------------------------------------------------
# It knows a GPU's free memory without a context on the GPU. A context takes some hundred MB of the
# GPU and of this process, until the process ends.


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def free_nbytes(uuids: Iterable[str]) -> dict[str, int]:
    """Return the free memory of some GPUs, in bytes, by their UUIDs; blocks for milliseconds.

    Args:
        uuids: as CUDA has them, without the prefix `GPU-`.

    Returns:
        Those that the library knows. None where there is no library or no driver for it.
    """
    with _library() as library:
        if library is None:
            return {}
        found = {uuid: _free_nbytes(library, uuid) for uuid in uuids}
    return {uuid: nbytes for uuid, nbytes in found.items() if nbytes is not None}


def _free_nbytes(library: ctypes.CDLL, uuid: str) -> int | None:
    handle, memory = ctypes.c_void_p(), _Memory()
    for kind in _KINDS:
        name = f"{kind}-{uuid}".encode()
        if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != 0:
            continue
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
            return int(memory.free)
    return None


@contextlib.contextmanager
def _library() -> Iterator[ctypes.CDLL | None]:
    """Load the library; yields None where that fails."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        is_ready = library.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        yield None
        return
    if not is_ready:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()
