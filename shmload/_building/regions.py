"""The regions of memory that tensors lie in."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

Spot = tuple[int, int]
"""Of a tensor: its region, and where it begins there, in bytes."""


class Region(NamedTuple):
    """Memory that one tensor has, or several that share it."""

    address: int
    nbytes: int
    """In bytes."""
    dtype: torch.dtype
    """Of the first tensor in it; of bytes if they differ."""


def merge(tensors: Sequence[torch.Tensor]) -> tuple[list[Region], list[Spot]]:
    """Return the regions of some tensors, and the place of each tensor."""
    spans = sorted(
        (tensor.data_ptr(), _extent_of(tensor), number)
        for number, tensor in enumerate(tensors)
        if tensor.numel()
    )
    regions: list[Region] = []
    places = [(-1, 0)] * len(tensors)
    for address, nbytes, number in spans:
        dtype = tensors[number].dtype
        last = regions[-1] if regions else None
        if last is None or address >= last.address + last.nbytes:
            regions.append(Region(address, nbytes, dtype))
        else:
            joined = max(last.nbytes, address + nbytes - last.address)
            is_one = dtype == last.dtype and (address - last.address) % dtype.itemsize == 0
            regions[-1] = Region(last.address, joined, dtype if is_one else torch.uint8)
        places[number] = len(regions) - 1, address - regions[-1].address
    return regions, places


def _extent_of(tensor: torch.Tensor) -> int:
    """Return how many bytes lie from a tensor's first element to behind its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
