"""New memory of the host that is page-locked, so that devices fetch from it by themselves.

The kernel neither moves nor swaps page-locked memory. CUDA calls it pinned.
"""

import contextlib
import mmap

import torch

from shmload._runtimes.runtime import Runtime

_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class PageLocked:
    """Some memory, page-locked in the first of three ways that the driver allows.

    It registers memory of this process, which is the system's again after `close`. Or torch gives
    some, which torch keeps in a cache. Or it stays ordinary memory, and copies from it are slower.

    Args:
        nbytes: how many bytes.
        runtime: of the device that fetches from there; others may too.
    """

    def __init__(self, nbytes: int, runtime: Runtime) -> None:
        self._runtime: Runtime | None = None
        self.content = _own_memory(nbytes)
        """Flat uint8."""
        if runtime.register(self.content.data_ptr(), nbytes, read_only=False):
            self._runtime = runtime
        elif (memory := runtime.page_locked(nbytes)) is not None:
            self.content = memory

    def close(self) -> None:
        """Release it; no copy from there may be under way. A second call does nothing."""
        runtime, self._runtime = self._runtime, None
        if runtime:
            runtime.unregister(self.content.data_ptr())


def _own_memory(nbytes: int) -> torch.Tensor:
    """Return new memory whose pages are there: a driver would make them one by one."""
    mapped = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with contextlib.suppress(OSError):  # a kernel without it
            mapped.madvise(advice)
    return torch.frombuffer(mapped, dtype=torch.uint8)
