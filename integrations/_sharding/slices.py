"""Which slice of a tensor a rank keeps.

Guarantee: slices are computed from shapes alone, so ranks agree without communication. The slices
of all ranks, without replicas, are the whole tensor, each element once.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Split(NamedTuple):
    """A dimension of a tensor divided over the ranks of one dimension of a mesh."""

    dim: int
    """The tensor's dimension, from 0."""
    ranks: int
    """How many ranks the mesh dimension has."""
    rank: int
    """This process's rank among them."""
    shards: int | None = None
    """Number of shards this dimension already has when a later mesh dimension was applied first
    (FSDP over tensor parallelism); None for a plain `Shard`."""


class Slice(NamedTuple):
    """A rank's slice of a tensor: a box of its elements."""

    offsets: tuple[int, ...]
    """Offset of its first element, by dimension, in elements."""
    sizes: tuple[int, ...]
    """Size by dimension, in elements; a 0 makes the slice empty."""

    @property
    def selection(self) -> tuple[slice, ...]:
        """The index into the tensor that gives the slice: `tensor[found.selection]` is a view."""
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(self.offsets, self.sizes, strict=True)
        )


class FlatSlice(NamedTuple):
    """A rank's slice of a flattened tensor; with padding, the slices of all ranks are as long."""

    begin: int
    """Offset of the first element, in elements."""
    end: int
    """Offset behind the last element, in elements."""
    padding: int
    """Number of elements behind it that are not the tensor's."""


def divide(size: int, count: int, index: int) -> tuple[int, int]:
    """Divide a dimension as `torch.chunk`, DTensor and FSDP2 do.

    All slices are as long as the first one, but the last that is not empty may be shorter, and the
    slices behind it are empty.

    Args:
        size: of the dimension, in elements.
        count: number of slices.
        index: of the slice that is returned.

    Returns:
        The offset of the slice and its size, in elements.
    """
    most = -(-size // count)
    begin = min(index * most, size)
    return begin, min(most, size - begin)


def slice_of(shape: Sequence[int], splits: Iterable[Split]) -> Slice:
    """Return a rank's slice of a tensor.

    Args:
        shape: of the whole tensor.
        splits: one for each dimension of the mesh that divides, in the mesh's order.

    Raises:
        ValueError: the splits do not fit the tensor or each other.
    """
    offsets, sizes, shards = [0] * len(shape), list(shape), [1] * len(shape)
    splits = list(splits)
    in_order = [split for split in splits if split.shards is None]
    late = [split for split in reversed(splits) if split.shards is not None]
    for split in (*in_order, *late):
        dim = split.dim
        if not 0 <= dim < len(shape):
            raise ValueError(f"a tensor of {len(shape)} dimensions has no dimension {dim}")
        if split.shards is not None and split.shards != shards[dim]:
            raise ValueError(f"dimension {dim} is in {shards[dim]} shards and not {split.shards}")
        begin, sizes[dim] = divide(sizes[dim], split.ranks, split.rank)
        offsets[dim] += begin
        shards[dim] *= split.ranks
    return Slice(tuple(offsets), tuple(sizes))


def flat_slice(shape: Sequence[int], ranks: int, rank: int) -> FlatSlice:
    """Return a rank's slice under ZeRO-3, as DeepSpeed divides each parameter.

    Args:
        shape: of the whole tensor.
        ranks: how many ranks there are.
        rank: whose slice is returned.
    """
    numel = math.prod(shape)
    most = -(-numel // ranks)
    begin, size = divide(numel, ranks, rank)
    return FlatSlice(begin, begin + size, most - size)
