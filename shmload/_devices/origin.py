"""Parts of segments that weights wait in, so that a device fetches them from there again and again.

The pages that a device fetches from are the segment's own: processes that pin the same segment
share them. What this process writes to its weights is not in these pages.
"""

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from shmload._devices.pinned import Budget, Pages, own_budget
from shmload._host.descriptors import Descriptor, Inode
from shmload._host.limits import allow_descriptors
from shmload._host.memory import PAGE_NBYTES
from shmload._host.pagemap import has_own_pages
from shmload._host.procfs import Mapping, mappings
from shmload._host.shm import reopen
from shmload._runtimes.runtime import Runtime
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)

# Tensors that are no further apart are pinned together.
_GAP_NBYTES = 64 << 10


class Origin:
    """The part of one segment that some weights lie in; pinned from its first use to its own end.

    Args:
        file: the segment.
        offset: where the part begins in the file, in bytes, on a page.
        start: address of the part in the mapping that the weights lie in.
        end: the address behind it, on a page.
        storage: of a weight in the mapping: kept, so that nothing else comes to lie there.
    """

    def __init__(
        self,
        file: Descriptor,
        offset: int,
        start: int,
        end: int,
        storage: torch.UntypedStorage,
    ) -> None:
        self._file = file
        self._storage = storage
        self._offset = offset
        self._start = start
        self._end = end
        self._pages: Pages | None = None
        self._is_refused = False
        self._release: Callable[[], object] = lambda: None

    @property
    def _nbytes(self) -> int:
        return self._end - self._start

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
        """Return the pinned bytes of a tensor: flat uint8, valid until `unpin`."""
        assert self._pages is not None
        begin = tensor.data_ptr() - self._start
        return self._pages.content[begin : begin + tensor.numel() * tensor.itemsize]

    def pin(self, runtime: Runtime) -> bool:
        """Pin the pages unless they are; return whether they are pinned.

        What a driver or the system refused is not tried again. What this process's budget lacks
        room for is.
        """
        budget = own_budget()
        if self._pages is None and not self._is_refused and budget.take(self._nbytes):
            try:
                self._pages = self._register(runtime)
                self._is_refused = self._pages is None
                if self._pages:
                    release = weakref.finalize(self, _unpin, self._pages, budget, self._nbytes)
                    release.atexit = False  # the end of the process unpins
                    self._release = release
            except (OSError, ShmloadError) as exc:
                self._is_refused = True
                _say_once(str(exc))
            finally:
                if self._pages is None:
                    budget.give_back(self._nbytes)
        return self._pages is not None

    def _register(self, runtime: Runtime) -> Pages | None:
        """Return the pages, pinned; None if the driver refuses."""
        size = os.fstat(self._file.fd).st_size
        nbytes = min(self._nbytes, size - self._offset)
        for _ in range(2):  # the first refusal may tell that pages must be writable
            was_read_only = runtime.registers_read_only
            pages = Pages(self._file.fd, runtime, self._offset, nbytes)
            if pages.register(0, nbytes):
                return pages
            if runtime.registers_read_only == was_read_only:
                break
        return None

    def unpin(self) -> None:
        """Unpin the pages if they are pinned; no copy from there may be under way."""
        self._pages = None
        self._release()


class Segments:
    """The open segments that weights may lie in.

    Args:
        files: each with a descriptor, the caller's: it is opened again.
    """

    def __init__(self, files: Iterable[tuple[Inode, int]]) -> None:
        self._files: dict[Inode, Descriptor] = {}
        for inode, fd in files:
            self._files[inode] = file = Descriptor(reopen(fd))
            weakref.finalize(file, os.close, file.fd).atexit = False
        self._mappings = mappings(set(self._files))

    def origins(self, tensors: Iterable[torch.Tensor]) -> list[Origin]:
        """Return the parts that hold those of some tensors that lie in the segments."""
        found: list[Origin] = []
        by_address = {t.data_ptr(): t for t in tensors if t.is_cpu and t.numel()}
        for there in self._mappings:
            inside = [t for address, t in sorted(by_address.items()) if _lies_in(t, there)]
            spans = ((t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in inside)
            for begin, end in _joined(spans):
                offset = there.offset + begin - there.start
                storage = inside[0].untyped_storage()
                found.append(Origin(self._files[there.inode], offset, begin, end, storage))
        allow_descriptors(len(found))  # Python's mmap has one each
        return found


def _unpin(pages: Pages, budget: Budget, nbytes: int) -> None:
    try:
        pages.release(0)
    finally:
        budget.give_back(nbytes)


def _lies_in(tensor: torch.Tensor, mapping: Mapping) -> bool:
    begin = tensor.data_ptr()
    return mapping.start <= begin and begin + tensor.numel() * tensor.itemsize <= mapping.end


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


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("weights that wait are not pinned, and copied more slowly: %s", reason)
