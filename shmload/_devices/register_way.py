"""The way `register`: devices fetch from the pages of segments, which are registered for that.

Nothing is copied twice, but to register takes time for each page: which way is quicker depends on
the machine (`calibration`). Only pages that are a file's own are registered: the kernel copies
those of a private mapping to pin them. All other bytes take the ring.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from shmload._devices.moves import Allocation
from shmload._devices.pages import Pages, why_not_register
from shmload._devices.ring_way import RingCopier
from shmload._devices.runtime import Event, drain
from shmload._devices.upload import filler_count
from shmload._devices.way import Way
from shmload._host.descriptors import Inode
from shmload._host.procfs import Mapping, mappings, modified_nbytes

_LANE = 0
# Registering takes time for each page: some windows are copied while threads register the next, one
# each. So at most 640 MiB are pinned at a time.
_WINDOW_NBYTES = 64 << 20
_COPYING = 2
_MAX_AHEAD = 8


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
    if not (allocations and files) or why_not_register(allocations[0].runtime):
        return list(left)
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


class _Window(NamedTuple):
    """Consecutive pages of a file that are registered together."""

    begin: int
    """Offset of its first byte in the file."""
    end: int
    """Offset behind its last byte in the file."""
    overlaps: list[tuple[Allocation, int, int]]
    """The allocations with bytes in it, and the addresses of those bytes."""


def _copy(allocations: Sequence[Allocation], mapping: Mapping, fd: int) -> bool:
    """Copy allocations that lie in one mapping, one window of the file after the other.

    While the device fetches from some windows, threads register the next ones.

    Returns:
        Whether the driver registered all windows.
    """
    base = mapping.start - mapping.offset
    runtimes = {there.runtime for there in allocations}
    for runtime in runtimes:
        runtime.follow(_LANE)
    ahead = min(_MAX_AHEAD, filler_count())
    with (
        Pages(fd, allocations[0].runtime) as pages,
        ThreadPoolExecutor(ahead, "shmload-register") as executor,
    ):
        wanted = deque(_windows(allocations, base, pages.content.numel()))
        registering: deque[tuple[_Window, Future[bool]]] = deque()
        copying: deque[tuple[_Window, list[Event]]] = deque()
        try:
            while wanted or registering:
                while wanted and len(registering) < ahead:
                    window = wanted.popleft()
                    task = executor.submit(pages.register, window.begin, window.end)
                    registering.append((window, task))
                if len(copying) == _COPYING:
                    window, events = copying.popleft()
                    for event in events:
                        event.wait()
                    pages.release(window.begin)
                window, task = registering.popleft()
                if not task.result():
                    return False
                _start(window, pages.content, base)
                copying.append((window, [runtime.record(_LANE) for runtime in runtimes]))
        finally:
            executor.shutdown(cancel_futures=True)
            drain(runtimes, _LANE)
    return True


def _start(window: _Window, content: torch.Tensor, base: int) -> None:
    """Start to copy the bytes of a window."""
    for there, low, high in window.overlaps:
        first = there.moves[0].address
        source = content[low - base : high - base]
        there.runtime.copy(there.memory[low - first : high - first], source, _LANE)


def _windows(allocations: Sequence[Allocation], base: int, nbytes: int) -> Iterator[_Window]:
    """Yield the windows of a file that have bytes of allocations.

    Args:
        allocations: that lie in a mapping of the file.
        base: the address that the file's first byte has there.
        nbytes: size of the file, in bytes.
    """
    for begin in range(0, nbytes, _WINDOW_NBYTES):
        end = min(nbytes, begin + _WINDOW_NBYTES)
        if overlaps := list(_overlaps(allocations, base + begin, base + end)):
            yield _Window(begin, end, overlaps)


def _overlaps(
    allocations: Sequence[Allocation], begin: int, end: int
) -> Iterator[tuple[Allocation, int, int]]:
    """Yield the allocations with bytes in a range, and the addresses of those bytes."""
    for there in allocations:
        low = max(begin, there.moves[0].address)
        high = min(end, there.moves[0].end)
        if low < high:
            yield there, low, high


class _Registering(RingCopier):
    """Copies from registered pages where it can, and through a ring elsewhere."""

    def copy(
        self, allocations: Sequence[Allocation], files: Sequence[tuple[Inode, int]]
    ) -> Sequence[Allocation]:
        """Copy bytes of this process's memory: see `Copier`."""
        left = copy_registered(allocations, files)
        super().copy(left, files)
        return left


REGISTER = Way(name="register", is_measured=True, why_not=why_not_register, open=_Registering)
