"""Which part of a tensor belongs to which rank.

Guarantee: what is computed here depends on shapes alone, so all ranks agree without a word, and the
parts of all ranks that do not repeat each other are the tensor, once.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Split(NamedTuple):
    """A dimension of a tensor divided over the ranks of one dimension of a mesh."""

    dim: int
    """Of the tensor."""
    ranks: int
    """How many there are."""
    rank: int
    """Which of them this is."""
    shards: int | None = None
    """For a split of what other mesh dimensions have split already, although they come later: into
    how many; None for one that comes in its order. FSDP over tensor parallelism is such a split."""


class Region(NamedTuple):
    """A box in a tensor."""

    offsets: tuple[int, ...]
    """Where it begins, by dimension, in elements."""
    sizes: tuple[int, ...]
    """Likewise; one of 0 makes it empty."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """What selects it from the tensor: `tensor[region.slices]` is a view."""
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(self.offsets, self.sizes, strict=True)
        )


class Share(NamedTuple):
    """A rank's part of a tensor as a flat row of elements; all ranks' are equally long."""

    begin: int
    """Its first element."""
    end: int
    """Behind its last one."""
    padding: int
    """How many elements that are not the tensor's stand behind it."""


def divide(size: int, count: int, index: int) -> tuple[int, int]:
    """Divide a row as `torch.chunk` does, and as DTensor and FSDP2 do.

    All parts are as long as the first one, but the last that is not empty may be shorter; those
    behind it are empty.

    Args:
        size: of the row, in elements.
        count: of the parts.
        index: of the part that is asked for.

    Returns:
        Where the part begins, and its size.
    """
    most = -(-size // count)
    begin = min(index * most, size)
    return begin, min(most, size - begin)


def region(shape: Sequence[int], splits: Iterable[Split]) -> Region:
    """Return what a rank has of a tensor.

    Args:
        shape: of the whole tensor.
        splits: by the mesh's dimensions, in their order, but for those that only repeat.

    Raises:
        ValueError: they do not say how the tensor is divided.
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
    return Region(tuple(offsets), tuple(sizes))


def share(shape: Sequence[int], ranks: int, rank: int) -> Share:
    """Return what a rank has of a tensor under ZeRO-3, as DeepSpeed divides each parameter.

    Args:
        shape: of the tensor.
        ranks: how many there are.
        rank: which of them is asked about.
    """
    numel = math.prod(shape)
    most = -(-numel // ranks)
    begin, size = divide(numel, ranks, rank)
    return Share(begin, begin + size, most - size)
