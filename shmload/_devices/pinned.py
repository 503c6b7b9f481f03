"""A ring's memory as devices see it: pinned, so that they fetch from it by themselves.

Torch would keep its own pinned memory in a cache until the process ends; this is given back. Only
devices that register no pages take torch's.
"""

import ctypes
from types import TracebackType
from typing import Self

import torch

from shmload._decoding.ring import Ring
from shmload._host.memory import populate
from shmload._runtimes.runtime import Runtime


class PinnedRing:
    """Pins a ring's memory, each slot when it is first used; a context that unpins it.

    Several threads may use it, each with slots of its own.

    Args:
        ring: stays the caller's.
        runtime: of the device that pins it; other devices may fetch from there too.
        memory: pinned memory to use instead of the ring's, at least as large; None for the ring's.
    """

    def __init__(self, ring: Ring, runtime: Runtime, memory: torch.Tensor | None = None) -> None:
        self._slot_nbytes = ring.shape.slot_nbytes
        self._runtime = runtime if memory is None else None
        if memory is None:
            memory = torch.frombuffer(ring.memory, dtype=torch.uint8)
        self._memory = memory
        self._seen: set[int] = set()
        self._registered: list[int] = []
        self._is_refused = False

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
        memory = self._memory[offset : offset + self._slot_nbytes]
        if self._runtime and offset not in self._seen:
            self._seen.add(offset)
            self._register(self._runtime, memory)
        return memory

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
        runtime, self._runtime = self._runtime, None
        while runtime and self._registered:
            runtime.unregister(self._registered.pop())

    def _register(self, runtime: Runtime, memory: torch.Tensor) -> None:
        if self._is_refused:
            return
        # Pages that a worker has filled are not in this process's page table yet.
        populate(memory.data_ptr(), memory.numel())
        if runtime.register(memory.data_ptr(), memory.numel(), read_only=False):
            self._registered.append(memory.data_ptr())
        else:
            self._is_refused = True
