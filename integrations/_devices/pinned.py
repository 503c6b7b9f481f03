"""A ring's memory as devices see it: registered, so that they fetch from it by themselves.

Torch's own pinned memory would stay with its cache for ever; this is given back as a whole.
"""

import ctypes
from types import TracebackType
from typing import Self

import torch

from shmload._decoding.ring import Ring
from shmload.integrations._devices.runtime import Runtime


class PinnedRing:
    """Registers a ring's memory, from here until `close`; a context that ends it.

    Args:
        ring: stays the caller's.
        runtime: of one device; the others may fetch from there as well. None for not registering.
    """

    def __init__(self, ring: Ring, runtime: Runtime | None) -> None:
        self._memory = torch.frombuffer(ring.memory, dtype=torch.uint8)
        self._slot_nbytes = ring.shape.slot_nbytes
        self._registered_by: Runtime | None = None
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
        """Copy bytes of this process into the ring; other threads run meanwhile."""
        ctypes.memmove(self._memory.data_ptr() + offset, address, nbytes)

    def close(self) -> None:
        """Undo the registration, when no copy from there is under way any more; again is fine."""
        runtime, self._registered_by = self._registered_by, None
        if runtime:
            runtime.unregister(self._memory.data_ptr())
