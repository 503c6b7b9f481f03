"""Copies from the pages of segments themselves, which the device's driver is told of.

Nothing is copied twice, but telling the driver takes time for each page: which way is quicker
depends on the machine (`calibration`). Only pages that are a file's own are registered: the kernel
copies those of a private mapping to pin them.
"""

import contextlib
import mmap
import warnings
from collections.abc import Iterator, Sequence

import torch

from shmload._linux import Inode
from shmload._procfs import Mapping, mappings, modified_nbytes
from shmload.integrations.moves import Allocation
from shmload.integrations.runtime import drain

_LANE = 0


def copy_registered(
    allocations: Sequence[Allocation], files: Sequence[tuple[Inode, int]]
) -> list[Allocation]:
    """Copy what lies in files that can be registered; blocks until it is there.

    Args:
        allocations: what is wanted.
        files: whose mappings tensors may lie in, each with a descriptor; stay the caller's.

    Returns:
        The allocations that are still to be filled: small ones, those that do not lie in these
        files, that were written to, or whose pages the driver does not take.
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
    first, *others = allocation.moves
    return not others and mapping.start <= first.begin and first.end <= mapping.end


def _copy(allocations: Sequence[Allocation], mapping: Mapping, fd: int) -> bool:
    """Copy allocations that lie in one mapping; returns whether that was possible."""
    runtime = allocations[0].runtime
    with _shared(fd) as content:
        if not runtime.register(content.data_ptr(), content.numel(), read_only=True):
            return False
        try:
            for there in allocations:
                (move,) = there.moves
                begin = move.begin - mapping.start + mapping.offset
                source = content[begin : begin + move.nbytes]
                there.runtime.copy(there.memory[: move.nbytes], source, _LANE)
        finally:
            try:
                drain({there.runtime for there in allocations}, _LANE)
            finally:
                runtime.unregister(content.data_ptr())
    return True


@contextlib.contextmanager
def _shared(fd: int) -> Iterator[torch.Tensor]:
    """Map a whole file, shared and for reading only; yields its bytes."""
    mapped = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one could write to it by way of a tensor
        content = torch.frombuffer(mapped, dtype=torch.uint8)
    yield content
