"""A module whose weights travel to a device together, and the buffers there that blocks share.

What decides which block takes which buffer, and which is likely to compute next, is plain logic
without a device: `waiting` does what is decided here.
"""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
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


class Turns:
    """Buffers that take turns, and the order in which blocks were used.

    Blocks are named by any number, such as the `id` of a module.

    Args:
        buffers: how many buffers there are.
    """

    def __init__(self, buffers: int) -> None:
        self._held: list[int | None] = [None] * buffers
        self._users = [0] * buffers
        # Buffers, the one that was used longest ago first.
        self._turn = list(range(buffers))
        self._next: dict[int, int] = {}
        self._last: dict[Hashable, int] = {}

    def find(self, block: int) -> int | None:
        """Return the buffer that holds a block."""
        return self._held.index(block) if block in self._held else None

    def find_or_take(self, block: int) -> int | None:
        """Return the buffer that holds a block, or else one that `take` gives it."""
        found = self.find(block)
        return self.take(block) if found is None else found

    def take(self, block: int) -> int | None:
        """Give a block the buffer without users whose turn it is; return None if all have users.

        What that buffer held is gone. The caller fills it, and calls `drop` if that fails.
        """
        for buffer in self._turn:
            if self._users[buffer] == 0:
                self._held[buffer] = block
                self._to_end(buffer)
                return buffer
        return None

    def enter(self, buffer: int) -> None:
        """Note a user of a buffer: until it leaves, no other block takes the buffer."""
        self._users[buffer] += 1
        self._to_end(buffer)

    def leave(self, buffer: int) -> None:
        """Note that a user has gone; what the buffer holds stays until another block takes it."""
        self._users[buffer] -= 1

    def drop(self, block: int) -> None:
        """Forget that a buffer holds a block."""
        self._held = [None if held == block else held for held in self._held]

    def forget(self, block: int) -> None:
        """Forget all about a block, which is gone."""
        self.drop(block)
        self._next = {key: value for key, value in self._next.items() if block not in (key, value)}
        self._last = {key: value for key, value in self._last.items() if value != block}

    def expect(self, block: int, following: int) -> None:
        """Assume an order until another one is seen."""
        self._next.setdefault(block, following)

    def follow(self, block: int, caller: Hashable) -> int | None:
        """Note that a caller uses a block now; return the block that came next the last time.

        Args:
            block: in use from now on.
            caller: who uses it, such as a thread: each has an order of its own.
        """
        last = self._last.get(caller)
        if last is not None and last != block:
            self._next[last] = block
        self._last[caller] = block
        return self._next.get(block)

    def _to_end(self, buffer: int) -> None:
        self._turn.remove(buffer)
        self._turn.append(buffer)
