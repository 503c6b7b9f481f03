"""Which bytes of the host become which tensors of a device.

A target is made for each plain tensor of some modules; when its bytes are there, the module gets
it. Everything else, such as quantised weights, goes the way that torch moves it.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from shmload.integrations._devices.hollow import BytesNeeded
from shmload.integrations._devices.runtime import ALIGNMENT_NBYTES, Runtime

# Smaller tensors share an allocation of this size: thousands of them would cost more to allocate
# and to copy than their bytes do. A larger one has its own, which is free again when the tensor is.
_SLAB_NBYTES = 1 << 20

RuntimeOf = Callable[[str], Runtime | None]
"""Says by a tensor's path where it goes; None for leaving it where it is."""
IsStreamed = Callable[[torch.Tensor], bool]
"""Says of which tensors the bytes are not there yet and come in pieces."""


class Allocation:
    """Memory of a device for one large tensor or for several small ones.

    Args:
        runtime: of the device.
        nbytes: size.
        is_streamed: whether its bytes come in pieces.
    """

    def __init__(self, runtime: Runtime, nbytes: int, *, is_streamed: bool) -> None:
        self.runtime = runtime
        self.is_streamed = is_streamed
        self.memory = runtime.empty(_aligned(nbytes))
        self.moves: list[Move] = []
        """By their offsets."""
        self.used_nbytes = 0
        """How much of it is taken, gaps included, in bytes."""

    def has_room(self, nbytes: int) -> bool:
        """Tell whether so many bytes more fit."""
        return self.used_nbytes + nbytes <= self.memory.numel()

    def take(self, address: int, nbytes: int) -> torch.Tensor:
        """Return memory for bytes that are at an address of the host."""
        offset = self.used_nbytes
        self.moves.append(Move(address, nbytes, self, offset))
        self.used_nbytes += _aligned(nbytes)  # and so is the next one
        return self.memory[offset : offset + nbytes]


class Move(NamedTuple):
    """Consecutive bytes of the host on their way to a device."""

    begin: int
    """Their address."""
    nbytes: int
    allocation: Allocation
    offset: int
    """Where they go in the allocation, in bytes."""

    @property
    def end(self) -> int:
        """The address behind them."""
        return self.begin + self.nbytes


class _Place(NamedTuple):
    """Where a module holds a tensor."""

    holder: nn.Module
    name: str
    is_parameter: bool
    tensor: torch.Tensor
    runtime: Runtime | None


class Moves:
    """What is to be copied for some modules.

    Allocates the targets, on their devices. The modules stay as they are until `commit`.

    Args:
        modules: each with what says where its parts go.
        is_streamed: see there; None if all bytes are there.

    Raises:
        BytesNeeded: a tensor that is streamed is to stay, or is no run of bytes.
    """

    def __init__(
        self,
        modules: Iterable[tuple[nn.Module, RuntimeOf]],
        is_streamed: IsStreamed | None = None,
    ) -> None:
        self._plain: list[tuple[_Place, torch.Tensor]] = []
        self._others: dict[nn.Module, dict[int, Runtime]] = {}
        self.allocations: list[Allocation] = []
        self._slabs: dict[tuple[Runtime, bool], Allocation] = {}
        targets: dict[tuple[object, ...], torch.Tensor] = {}
        for place in itertools.chain.from_iterable(itertools.starmap(_places, modules)):
            tensor, runtime = place.tensor, place.runtime
            comes_later = is_streamed is not None and is_streamed(tensor)
            if comes_later and (runtime is None or not _is_plain(tensor)):
                raise BytesNeeded  # nobody would bring them
            if runtime is None:
                continue
            if not _is_plain(tensor):
                self._others.setdefault(place.holder, {})[id(tensor)] = runtime
                continue
            # Tied tensors have one target for each device.
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, runtime)
            if key not in targets:
                nbytes = tensor.numel() * tensor.itemsize
                allocation = self._allocate(runtime, nbytes, is_streamed=comes_later)
                target = allocation.take(tensor.data_ptr(), nbytes)
                targets[key] = target.view(tensor.dtype).view(tensor.shape)
            self._plain.append((place, targets[key]))
        streamed = (there.moves for there in self.allocations if there.is_streamed)
        self._streamed = sorted(itertools.chain(*streamed), key=lambda move: move.begin)
        # The furthest end so far, for each: tensors may overlap.
        self._reach = list(itertools.accumulate((move.end for move in self._streamed), max))

    @property
    def runtimes(self) -> list[Runtime]:
        """The devices that something is copied to."""
        return list(dict.fromkeys(there.runtime for there in self.allocations))

    @property
    def staged(self) -> list[Allocation]:
        """The allocations whose bytes are there already."""
        return [there for there in self.allocations if not there.is_streamed]

    def streamed_within(self, begin: int, end: int) -> Iterator[tuple[Move, int, int]]:
        """Yield the streamed moves that need bytes of a range, each with what it needs of it.

        Args:
            begin: of the range, an address.
            end: behind it.
        """
        first = bisect.bisect_right(self._reach, begin)
        for move in itertools.islice(self._streamed, first, None):
            if move.begin >= end:
                return
            low, high = max(begin, move.begin), min(end, move.end)
            if low < high:
                yield move, low, high

    def commit(self) -> None:
        """Give the modules their tensors; all bytes must be there.

        What torch has to move comes first: until all of that is done the modules are as they were.
        """
        moved: dict[tuple[int, Runtime], torch.Tensor] = {}
        for holder, wanted in self._others.items():
            for tensor in (*holder._parameters.values(), *holder._buffers.values()):
                if tensor is not None and id(tensor) in wanted:
                    _move(tensor, wanted, moved)
        for place, target in self._plain:
            if place.is_parameter:
                # As `Module.to` does: the parameter stays the same object, so ties and hooks stay.
                place.tensor.data = target
            else:
                place.holder._buffers[place.name] = target
        for holder, wanted in self._others.items():
            move = functools.partial(_move, wanted=wanted, moved=moved)
            holder._apply(move, recurse=False)  # type: ignore[no-untyped-call]

    def _allocate(self, runtime: Runtime, nbytes: int, *, is_streamed: bool) -> Allocation:
        """Return an allocation that has so many bytes left."""
        key = (runtime, is_streamed)
        is_large = nbytes >= _SLAB_NBYTES // 2
        if not is_large and key in self._slabs and self._slabs[key].has_room(nbytes):
            return self._slabs[key]
        fresh = Allocation(runtime, nbytes if is_large else _SLAB_NBYTES, is_streamed=is_streamed)
        self.allocations.append(fresh)
        if not is_large:
            self._slabs[key] = fresh
        return fresh


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _move(
    tensor: torch.Tensor, wanted: dict[int, Runtime], moved: dict[tuple[int, Runtime], torch.Tensor]
) -> torch.Tensor:
    """Return a tensor where it is wanted; what several modules share stays one."""
    runtime = wanted.get(id(tensor))
    if runtime is None:
        return tensor
    key = (id(tensor), runtime)
    if key not in moved:
        with torch.no_grad():
            moved[key] = tensor.to(runtime.device)
    return moved[key]


def _places(module: nn.Module, runtime_of: RuntimeOf) -> Iterator[_Place]:
    for path, holder in module.named_modules():
        prefix = path + "." if path else ""
        for tensors, is_parameter in ((holder._parameters, True), (holder._buffers, False)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield _Place(holder, name, is_parameter, tensor, runtime_of(prefix + name))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is nothing but consecutive bytes of this process's memory."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and tensor.grad is None
    )
