"""Memory of the host that is pinned, so that devices fetch from it by themselves.

A file's own pages are registered a window at a time. Some drivers register no pages that are mapped
for reading only. For these a window is writable while it is registered, and read-only again before
a copy begins. A ring's memory is registered slot by slot; only devices that register no pages take
torch's pinned memory, which torch would keep in a cache until the process ends.

The kernel can neither move nor swap pinned pages, so a process has a budget of a file's pages. The
size of each part counts, in whole pages and nothing more: torch's own pinned memory would be
rounded up to powers of two. Parts that several processes pin are the same pages, and count in each.

Guarantee: nothing is written to the file, and no page stays registered after the context.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import warnings
from types import TracebackType
from typing import Self

import torch

from shmload._decoding.ring import Ring
from shmload._host.memory import populate, protect
from shmload._runtimes.runtime import Runtime
from shmload._segments.segment import open_to_map
from shmload._segments.users import page_lock_limit
from shmload._wording import format_nbytes, logger_of

logger = logger_of(__name__)


class Pages:
    """Maps a file, shared and read-only; a context that unregisters its windows.

    Several threads may register windows at once.

    Args:
        fd: of the file; stays the caller's.
        runtime: of the device that pins the pages; other devices may fetch from there too.
        begin: offset in the file from which on it is mapped, on a page.
        nbytes: how many bytes are mapped; 0 for all up to the end of the file.
    """

    def __init__(self, fd: int, runtime: Runtime, begin: int = 0, nbytes: int = 0) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        own = None if runtime.registers_read_only else open_to_map(fd)
        self._is_closed_to_drivers = own is None and not runtime.registers_read_only
        try:
            self.content = _map(fd if own is None else own, begin, nbytes)
            """The bytes that are mapped: flat uint8, read-only."""
        finally:
            if own is not None:
                os.close(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.ExitStack() as releasing:  # each, also if releasing another one fails
            for begin in list(self._registered):
                releasing.callback(self.release, begin)

    def register(self, begin: int, end: int) -> bool:
        """Pin a window, so that devices fetch from it by themselves.

        Args:
            begin: offset of its first byte in `content`, on a page.
            end: offset behind its last byte, on a page or at the end of `content`.

        Returns:
            Whether the driver did.
        """
        if self._is_closed_to_drivers:
            return False
        address, nbytes = self.content.data_ptr() + begin, end - begin
        # The driver would fault the pages in one by one, which takes twice as long.
        populate(address, nbytes)
        is_registered = self._pin(address, nbytes)
        if is_registered:
            with self._lock:
                self._registered.add(begin)
        return is_registered

    def release(self, begin: int) -> None:
        """Unpin the window that begins at an offset; no copy from there may be under way."""
        with self._lock:
            self._registered.remove(begin)
        self._runtime.unregister(self.content.data_ptr() + begin)

    def _pin(self, address: int, nbytes: int) -> bool:
        if self._runtime.registers_read_only:
            return self._runtime.register(address, nbytes, read_only=True)
        protect(address, nbytes, writable=True)
        try:
            is_registered = self._runtime.register(address, nbytes, read_only=False)
        except BaseException:
            protect(address, nbytes, writable=False)
            raise
        try:
            protect(address, nbytes, writable=False)
        except BaseException:
            if is_registered:
                self._runtime.unregister(address)
            raise
        return is_registered


def _map(fd: int, begin: int, nbytes: int) -> torch.Tensor:
    mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns: the memory is read-only, tensors are not
        return torch.frombuffer(mapped, dtype=torch.uint8)


class Budget:
    """A number of bytes that may be taken; several threads may use it.

    Args:
        limit_nbytes: the most that may be taken at a time.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.taken_nbytes = 0
        """What is taken now."""
        # A finalizer may give back at any point of a thread that has the lock.
        self._lock = threading.RLock()
        self._has_said = False

    def take(self, nbytes: int) -> bool:
        """Take some bytes if they are left; return whether they were; log the first refusal."""
        with self._lock:
            fits = self.taken_nbytes + nbytes <= self.limit_nbytes
            is_news = not (fits or self._has_said)
            if fits:
                self.taken_nbytes += nbytes
            else:
                self._has_said = True
        if is_news:
            logger.warning(
                "%s of weights that wait for an accelerator are pinned, and no more than %s may "
                "be: the others are copied more slowly (SHMLOAD_PAGE_LOCKED sets the limit)",
                format_nbytes(self.taken_nbytes),
                format_nbytes(self.limit_nbytes),
            )
        return fits

    def give_back(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self.taken_nbytes -= nbytes


@functools.cache
def own_budget() -> Budget:
    """Return this process's budget for pinned weights."""
    return Budget(page_lock_limit())


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
