"""Parts of segments that weights wait in, so that a device fetches from them again and again.

The pages that a device fetches from are the segment's own, mapped for reading only and registered
with the driver: processes that lock the same segment share them. What this process writes to its
weights is not in these pages. The kernel can neither move nor swap them, so a process has a limit.

Guarantee: nothing is written to the file, and nothing stays registered after the last use.
"""

import functools
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from shmload._host.descriptors import Descriptor, Inode
from shmload._host.limits import allow_descriptors
from shmload._host.memory import PAGE_NBYTES, has_own_pages, populate
from shmload._host.procfs import Mapping, cgroup_limit_nbytes, mappings_of
from shmload._host.shm import reopen
from shmload._runtimes.runtime import Runtime, say_once
from shmload._settings import settings
from shmload._wording import format_nbytes

# Tensors that are no further apart are locked together.
_GAP_NBYTES = 64 << 10
# The driver has a lock while it registers memory, and fails from 512 GiB on.
_WINDOW_NBYTES = 1 << 30


class PageLimit:
    """A number of bytes that may be locked; several threads may use it.

    Args:
        limit_nbytes: the most that may be taken at a time.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.taken_nbytes = 0
        """What is taken now."""
        # A finalizer may give back at any point of a thread that has the lock.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> bool:
        """Take some bytes if they are left; return whether they were; log the first refusal."""
        with self._lock:
            fits = self.taken_nbytes + nbytes <= self.limit_nbytes
            self.taken_nbytes += nbytes if fits else 0
        if not fits:
            say_once(
                f"no more than {format_nbytes(self.limit_nbytes)} of weights that wait for an "
                "accelerator are page-locked (SHMLOAD_PAGE_LOCKED sets the limit)"
            )
        return fits

    def give_back(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self.taken_nbytes -= nbytes


@functools.cache
def own_limit() -> PageLimit:
    """Return this process's limit for weights that wait.

    By default it is half of the memory that the machine has, or this process's control groups.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    half = min(machine, cgroup_limit_nbytes() or machine) // 2
    chosen = settings().page_locked
    return PageLimit(half if chosen is None else chosen)


class Origin:
    """The part of one segment that some weights lie in; locked from its first use to its own end.

    Args:
        file: the segment.
        offset: where the part begins in the file, in bytes, on a page.
        start: address of the part in the mapping that the weights lie in.
        end: the address behind it, on a page.
        storage: of a weight in the mapping: kept, so that nothing else comes to lie there.
    """

    def __init__(
        self, file: Descriptor, offset: int, start: int, end: int, storage: torch.UntypedStorage
    ) -> None:
        self._file = file
        self._storage = storage
        self._offset = offset
        self._start = start
        self._end = end
        self._content: torch.Tensor | None = None
        self._is_refused = False
        self._release: Callable[[], object] = lambda: None

    @property
    def is_clean(self) -> bool:
        """Whether this process has not written to the weights."""
        return not has_own_pages(self._start, self._end)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is nothing but consecutive bytes of this part."""
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.itemsize
        return self._start <= begin and end <= self._end and tensor.is_contiguous()

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the locked bytes of a tensor: flat uint8, valid until `unlock`."""
        assert self._content is not None
        begin = tensor.data_ptr() - self._start
        return self._content[begin : begin + tensor.numel() * tensor.itemsize]

    def lock(self, runtime: Runtime) -> bool:
        """Lock the pages unless they are; return whether they are locked.

        What a driver or the system refused is not tried again. What this process's limit lacks
        room for is.
        """
        nbytes, limit = self._end - self._start, own_limit()
        if self._content is None and not self._is_refused and limit.take(nbytes):
            windows: list[int] = []
            release = weakref.finalize(self, _release, windows, runtime, limit, nbytes)
            release.atexit = False  # the end of the process unlocks
            try:
                content = _map(self._file.fd, self._offset, nbytes)
                self._is_refused = not _register(content, runtime, windows)
                if not self._is_refused:
                    self._content, self._release = content, release
            except OSError as exc:
                self._is_refused = True
                say_once(f"weights that wait are not page-locked ({exc})")
            finally:
                if self._content is None:
                    release()
        return self._content is not None

    def unlock(self) -> None:
        """Unlock the pages if they are locked."""
        self._release()
        self._content = None


class SegmentFiles:
    """The open segments that weights may lie in.

    Args:
        files: each with a descriptor, the caller's: it is opened again.
    """

    def __init__(self, files: Iterable[tuple[Inode, int]]) -> None:
        self._files: dict[Inode, Descriptor] = {}
        for inode, fd in files:
            self._files[inode] = file = Descriptor(reopen(fd))
            weakref.finalize(file, os.close, file.fd).atexit = False
        self._mappings = mappings_of(set(self._files))

    def origins(self, tensors: Iterable[torch.Tensor]) -> list[Origin]:
        """Return the parts that hold those of some tensors that lie in the segments."""
        found: list[Origin] = []
        inside: dict[Mapping, list[torch.Tensor]] = {}
        by_address = {t.data_ptr(): t for t in tensors if t.is_cpu and t.numel()}
        for address, tensor in sorted(by_address.items()):
            there = self._mappings.at(address)
            if there and address + tensor.nbytes <= there.end:
                inside.setdefault(there, []).append(tensor)
        for there, held in inside.items():
            for begin, end in _joined((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held):
                offset = there.offset + begin - there.start
                storage = held[0].untyped_storage()
                found.append(Origin(self._files[there.inode], offset, begin, end, storage))
        allow_descriptors(len(found))  # Python's mmap has one each
        return found


def _map(fd: int, begin: int, nbytes: int) -> torch.Tensor:
    nbytes = min(nbytes, os.fstat(fd).st_size - begin)
    mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns: the memory is read-only, tensors are not
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _register(content: torch.Tensor, runtime: Runtime, windows: list[int]) -> bool:
    """Register mapped pages, window by window.

    Args:
        content: the pages.
        runtime: of the device.
        windows: gets the address of each window that is registered.

    Returns:
        Whether all are.
    """
    for begin in range(0, content.numel(), _WINDOW_NBYTES):
        window = content[begin : begin + _WINDOW_NBYTES]
        # The driver would fault the pages in one by one, which takes twice as long.
        populate(window.data_ptr(), window.numel())
        if not runtime.register(window.data_ptr(), window.numel(), read_only=True):
            return False
        windows.append(window.data_ptr())
    return True


def _release(windows: list[int], runtime: Runtime, limit: PageLimit, nbytes: int) -> None:
    try:
        if windows:
            runtime.drain()  # a copy from there may be under way
        while windows:
            runtime.unregister(windows.pop())
    finally:
        limit.give_back(nbytes)


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield whole pages that cover some ranges of addresses, which come in order."""
    begin = end = 0
    for low, high in spans:
        low -= low % PAGE_NBYTES
        high += -high % PAGE_NBYTES
        if end and low - end > _GAP_NBYTES:
            yield begin, end
            begin = low
        elif not end:
            begin = low
        end = max(end, high)
    if end:
        yield begin, end
