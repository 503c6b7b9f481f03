"""NVIDIA's management library, which knows a GPU's free memory without a context on the GPU.

A context takes some hundred MB of the GPU and of this process, until the process ends.
"""

import contextlib
import ctypes
from collections.abc import Iterable, Iterator

_LIBRARY = "libnvidia-ml.so.1"
# A GPU, or a part of one that is a device of its own (MIG).
_KINDS = ("GPU", "MIG")


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
        The devices that NVML knows; empty without the library or its driver.
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
