"""A module whose weights travel to a device together, and how they lie in a buffer there."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shmload._devices.origin import Origin
from shmload._runtimes.runtime import ALIGNMENT_NBYTES


class Weight(NamedTuple):
    """A parameter on the host, and where a module has it."""

    holder: nn.Module
    name: str
    tensor: nn.Parameter


class Block:
    """One module whose weights travel together.

    Args:
        root: the module; weakly held.
        origins: that hold its weights, or some of them.
    """

    def __init__(self, root: nn.Module, origins: Sequence[Origin]) -> None:
        self.root = weakref.ref(root)
        self.origins = origins
        self.calls: Counter[int] = Counter()
        """How many calls of its modules are under way, by the thread that called."""
        self.buffer: int | None = None
        """The buffer that it computes from."""
        self.bound: list[tuple[Weight, nn.Parameter]] = []
        """Its weights, each with the parameter that stands for it on the device."""

    def weights(self) -> list[Weight]:
        """Return its parameters that are on the host: adapters may have come, others gone."""
        root = self.root()
        return [
            Weight(holder, name, tensor)
            for holder in (root.modules() if root else ())
            for name, tensor in holder._parameters.items()
            if tensor is not None and tensor.is_cpu
        ]

    def unpin(self) -> None:
        """Unpin the pages of its weights; no copy from there may be under way."""
        for origin in self.origins:
            origin.unpin()


class Layout:
    """Where the weights of a block lie in a buffer; weights outside of pinned pages have no place.

    Args:
        weights: of the block.
        origins: pinned.
    """

    def __init__(self, weights: Sequence[Weight], origins: Sequence[Origin]) -> None:
        self.offsets: dict[tuple[int, int, torch.dtype], int] = {}
        """Of each weight in the buffer, in bytes, by its address, size and dtype."""
        self._sources: list[tuple[Origin, nn.Parameter]] = []
        self.nbytes = 0
        """Size of all, in bytes, with the gaps between them."""
        for _, _, tensor in weights:
            there = next((each for each in origins if each.holds(tensor)), None)
            if there and _key(tensor) not in self.offsets:
                self.offsets[_key(tensor)] = self.nbytes
                self._sources.append((there, tensor))
                nbytes = tensor.numel() * tensor.itemsize
                self.nbytes += nbytes + -nbytes % ALIGNMENT_NBYTES

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.offsets == other.offsets

    __hash__ = None  # type: ignore[assignment] # it is compared and is no key

    def sources(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each weight's offset and its bytes in pinned pages."""
        for offset, (origin, tensor) in zip(self.offsets.values(), self._sources, strict=True):
            yield offset, origin.source(tensor)

    def view(self, memory: torch.Tensor, tensor: nn.Parameter) -> torch.Tensor | None:
        """Return a weight in a buffer; None if it is not there."""
        offset = self.offsets.get(_key(tensor))
        if offset is None:
            return None
        flat = memory[offset : offset + tensor.numel() * tensor.itemsize]
        return flat.view(tensor.dtype).view(tensor.shape)


def _key(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype
