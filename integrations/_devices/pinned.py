"""A ring's memory as devices see it: pinned, so that they fetch from it by themselves.

Torch would keep its own pinned memory in a cache until the process ends; this is given back. Only
devices that register no pages take torch's.
"""

import ctypes
from types import TracebackType
from typing import Self

import torch

from shmload._decoding.ring import Ring
from shmload.integrations._devices.runtime import Runtime


class PinnedRing:
    """Pins a ring's memory until `close`; a context that closes it.

    Args:
        ring: stays the caller's.
        runtime: of the device that pins it; other devices may fetch from there too. None for not
            pinning it.
        memory: pinned memory to use instead of the ring's, at least as large; None for the ring's.
    """

    def __init__(
        self, ring: Ring, runtime: Runtime | None, memory: torch.Tensor | None = None
    ) -> None:
        self._slot_nbytes = ring.shape.slot_nbytes
        self._registered_by: Runtime | None = None
        if memory is not None:
            self._memory = memory
            return
        self._memory = torch.frombuffer(ring.memory, dtype=torch.uint8)
        nbytes = self._memory.numel()
        if runtime and runtime.register(self._memory.data_ptr(), nbytes, read_only=False):
            self._registered_by = runtime

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def slot(self, offset: int) -> torch.Tensor:
        """Return a slot's memory: uint8, flat.

        Args:
            offset: where it begins in the ring, in bytes.
        """
        return self._memory[offset : offset + self._slot_nbytes]

    def put(self, offset: int, address: int, nbytes: int) -> None:
        """Copy bytes of this process into the ring, without the interpreter's lock.

        Args:
            offset: of the first byte in the ring, in bytes.
            address: of the first byte that is copied.
            nbytes: how many bytes.
        """
        ctypes.memmove(self._memory.data_ptr() + offset, address, nbytes)

    def close(self) -> None:
        """Unpin it; no copy from there may be under way. A second call does nothing."""
        runtime, self._registered_by = self._registered_by, None
        if runtime:
            runtime.unregister(self._memory.data_ptr())
