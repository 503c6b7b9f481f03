"""Which tensors lie in which mapping, and the leases that they keep."""

import itertools
import mmap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shmload._compat import as_plain_tensors, original_of_compiled
from shmload._host.descriptors import Inode
from shmload._host.memory import is_touched, map_at
from shmload._host.procfs import Mappings, mappings_of
from shmload._segments.lease import Lease
from shmload._segments.listing import names_by_inode, segments_by_lock
from shmload._segments.segment import Segment

# A page fault also maps the other pages of the same 64 KiB (fault_around_bytes), and safetensors
# reads the first byte of each tensor.
_FAULT_AROUND_NBYTES = 64 << 10


def is_in(mappings: Mappings, tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage begins in one of some mappings."""
    return tensor.is_cpu and mappings.at(tensor.untyped_storage().data_ptr()) is not None


def is_unread_in(mappings: Mappings, tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies in one of some mappings and nothing has read its inner pages.

    A tensor too small to have inner pages counts as unread if it lies in a mapping.
    """
    if tensor.numel() == 0:
        return True
    if not is_in(mappings, tensor):
        return False
    begin = tensor.data_ptr() + _FAULT_AROUND_NBYTES
    end = tensor.data_ptr() + tensor.numel() * tensor.itemsize - _FAULT_AROUND_NBYTES
    return end <= begin or not is_touched(begin, end)


def hold_leases(components: Iterable[Any], segments: Iterable[Segment], mappings: Mappings) -> int:
    """Keep a lease on each segment as long as a tensor lies in it.

    Each storage in a mapping that the library made counts. A segment without a name needs no lease:
    no process could evict it.

    Args:
        components: the models among them are looked through.
        segments: the complete ones.
        mappings: of the segments, and of files that were mapped in their place.

    Returns:
        The size of the storages on the host that lie in no such mapping, in bytes.
    """
    named = {each.inode: each for each in segments if each.has_name}
    users = defaultdict[Inode, list[torch.UntypedStorage]](list)
    seen = set()
    private_nbytes = 0
    for component in components:
        for tensor in host_tensors(component) if isinstance(component, torch.nn.Module) else ():
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in seen:
                continue
            seen.add(address)
            mapping = mappings.at(address)
            if mapping is None:
                private_nbytes += storage.nbytes()
            elif mapping.inode in named:
                users[mapping.inode].append(storage)
    for inode, storages in users.items():
        Lease(named[inode]).end_with(storages)
    return private_nbytes


def host_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers on the host, or the tensors that these are made of.

    The iterators of torch make a name for each, which takes three times as long.
    """
    for module in modules_of(model):
        for tensor in itertools.chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None and tensor.is_cpu:
                yield from plain_tensors(tensor)


def measure(models: Iterable[torch.nn.Module], name: str) -> tuple[dict[str, int], int]:
    """Return how much models on the host take there, and how much they would take on a device.

    Args:
        models: whose tensors on devices do not count.
        name: stands for what lies in no segment.

    Returns:
        The sizes of the segments that they lie in, by name, and of what lies in none, in bytes; and
        the size of their tensors, in bytes.
    """
    names = names_by_inode()
    nbytes = {info.name: info.nbytes for info in segments_by_lock()}
    mappings = mappings_of(names.keys())
    with as_plain_tensors():
        tensors = [tensor for model in models for tensor in host_tensors(model)]
        copied = sum({each.data_ptr(): each.nbytes for each in tensors}.values())
        storages = {(s := each.untyped_storage()).data_ptr(): s.nbytes() for each in tensors}
    held: dict[str, int] = {}
    for address, size in storages.items():
        mapping = mappings.at(address)
        segment = names[mapping.inode] if mapping else name
        held[segment] = nbytes.get(segment) or held.get(segment, 0) + size
    return held, copied


def models_in(thing: Any) -> Mapping[str, torch.nn.Module]:
    """Return the models of a pipeline by name, or a model by the empty name; none compiled."""
    parts = {"": thing} if isinstance(thing, torch.nn.Module) else vars(thing)
    return {
        name: original_of_compiled(part) or part
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module)
    }


def modules_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield what `model.modules()` does, in its order.

    That is a generator within a generator for each level, which takes four times as long.
    """
    seen = set()
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend(reversed(module._modules.values()))


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors whose storages hold a tensor: itself, or those that it is made of.

    A quantised tensor of torchao or quanto has no storage: it holds integers and scales.
    """
    make_plan = getattr(tensor, "__tensor_flatten__", None)
    if make_plan is None:
        yield tensor
        return
    for name in make_plan()[0]:
        yield from plain_tensors(getattr(tensor, name))


def map_ranges(fd: int, ranges: Sequence[tuple[int, int]]) -> mmap.mmap:
    """Map ranges of a file one after the other, copy-on-write.

    Args:
        fd: the file; stays the caller's.
        ranges: offset and length of each, in bytes; the offset, and all lengths but the last, are
            whole pages.

    Returns:
        The bytes. The mapping goes with it and with the tensors over it, and keeps no descriptor.
    """
    # The file is mapped over this memory.
    owner = mmap.mmap(-1, sum(nbytes for _, nbytes in ranges), flags=mmap.MAP_PRIVATE)
    begin = np.frombuffer(owner, np.uint8).ctypes.data
    for offset, nbytes in ranges:
        map_at(begin, begin + nbytes, fd, offset)
        begin += nbytes
    return owner
