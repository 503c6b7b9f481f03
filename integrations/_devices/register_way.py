"""The way `register`: devices fetch from the pages of segments, which are registered for that.

Nothing is copied twice, but to register takes time for each page: which way is quicker depends on
the machine (`calibration`). Only pages that are a file's own are registered: the kernel copies
those of a private mapping to pin them. All other bytes take the ring.
"""

import contextlib
import mmap
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from shmload._host.linux import Inode
from shmload._host.procfs import Mapping, mappings, modified_nbytes
from shmload.integrations._devices.moves import Allocation
from shmload.integrations._devices.ring_way import RingCopier
from shmload.integrations._devices.runtime import Event, Runtime, drain
from shmload.integrations._devices.way import Way

_LANE = 0
# Registering takes time for each page: one window is copied while the next is registered.
_WINDOW_NBYTES = 1 << 30
_WINDOWS = 2


def copy_registered(
    allocations: Sequence[Allocation], files: Sequence[tuple[Inode, int]]
) -> list[Allocation]:
    """Copy allocations from files whose pages can be registered; blocks until they are there.

    Args:
        allocations: their bytes are in this process's memory.
        files: the segments that tensors may lie in, each with a descriptor, the caller's.

    Returns:
        The allocations that were not copied: they hold several small tensors, their tensor is in no
        file or in one that was written to, or the driver does not pin its pages.

    Raises:
        torch.OutOfMemoryError: a device is full.
        RuntimeError: a driver failed.
    """
    left = dict.fromkeys(allocations)
    for inode, fd in files:
        for mapping in mappings({inode}):
            wanted = [there for there in left if _lies_in(there, mapping)]
            if wanted and not modified_nbytes(mapping) and _copy(wanted, mapping, fd):
                for there in wanted:
                    del left[there]
    return list(left)


def _lies_in(allocation: Allocation, mapping: Mapping) -> bool:
    """Tell whether all bytes of an allocation, of one tensor, lie in a mapping."""
    first, *others = allocation.moves
    return not others and mapping.start <= first.address and first.end <= mapping.end


def _copy(allocations: Sequence[Allocation], mapping: Mapping, fd: int) -> bool:
    """Copy allocations that lie in one mapping, one window of the file after the other.

    While the device fetches from a window, the next one is registered.

    Returns:
        Whether the driver registered all windows.
    """
    base = mapping.start - mapping.offset
    runtimes = {there.runtime for there in allocations}
    for runtime in runtimes:
        runtime.follow(_LANE)
    with _shared(fd) as content, contextlib.ExitStack() as undoing:
        windows: deque[contextlib.ExitStack] = deque()
        for begin in range(0, content.numel(), _WINDOW_NBYTES):
            window = content[begin : begin + _WINDOW_NBYTES]
            overlaps = list(_overlaps(allocations, base + begin, base + begin + window.numel()))
            if not overlaps:
                continue
            if len(windows) == _WINDOWS:
                windows.popleft().close()
            if not allocations[0].runtime.register(
                window.data_ptr(), window.numel(), read_only=True
            ):
                return False
            windows.append(undoing.enter_context(contextlib.ExitStack()))
            windows[-1].callback(allocations[0].runtime.unregister, window.data_ptr())
            events: list[Event] = []
            windows[-1].callback(_finish, events, runtimes)
            for there, low, high in overlaps:
                source = window[low - base - begin : high - base - begin]
                first = there.moves[0].address
                there.runtime.copy(there.memory[low - first : high - first], source, _LANE)
            events += [runtime.record(_LANE) for runtime in runtimes]
    return True


def _finish(events: list[Event], runtimes: Iterable[Runtime]) -> None:
    """Wait for a window's copies. No events mean that a copy failed: wait for the whole lane."""
    if not events:
        drain(runtimes, _LANE)
    for event in events:
        event.wait()


def _overlaps(
    allocations: Sequence[Allocation], begin: int, end: int
) -> Iterator[tuple[Allocation, int, int]]:
    """Yield the allocations with bytes in a range, and the addresses of those bytes."""
    for there in allocations:
        low = max(begin, there.moves[0].address)
        high = min(end, there.moves[0].end)
        if low < high:
            yield there, low, high


@contextlib.contextmanager
def _shared(fd: int) -> Iterator[torch.Tensor]:
    """Map a whole file, shared and read-only; yields its bytes."""
    mapped = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns: the memory is read-only, tensors are not
        content = torch.frombuffer(mapped, dtype=torch.uint8)
    yield content


class _Registering(RingCopier):
    """Copies from registered pages where it can, and through a ring elsewhere."""

    def copy(
        self, allocations: Sequence[Allocation], files: Sequence[tuple[Inode, int]]
    ) -> Sequence[Allocation]:
        """Copy bytes of this process's memory: see `Copier`."""
        left = copy_registered(allocations, files)
        super().copy(left, files)
        return left


def _why_not(runtime: Runtime) -> str | None:
    """Try it with one page of a file."""
    fd = os.memfd_create("shmload-page", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with _shared(fd) as page:
            if not runtime.register(page.data_ptr(), page.numel(), read_only=True):
                return f"{runtime.name} does not register pages of a file"
            runtime.unregister(page.data_ptr())
            return None
    finally:
        os.close(fd)


REGISTER = Way(name="register", is_measured=True, why_not=_why_not, open=_Registering)
