"""Which bytes of the host become which tensors of a device.

Each plain tensor of a module gets a target on its device; when all bytes are there, the module gets
the targets. Torch itself moves other tensors, such as quantised weights.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from shmload._compat import takes_data_of
from shmload._devices.destination import BytesNeeded
from shmload._runtimes.runtime import ALIGNMENT_NBYTES, Runtime

# Smaller tensors share an allocation of this size: thousands of them would cost more to allocate
# and to copy than their bytes do. A larger one has its own, which is free again when the tensor is.
_SLAB_NBYTES = 1 << 20
_LARGE_NBYTES = _SLAB_NBYTES // 2

RuntimeOf = Callable[[str], Runtime | None]
"""Returns the device of a tensor by the tensor's path; None to leave it where it is."""
IsStreamed = Callable[[torch.Tensor], bool]
"""Tells whether a tensor's bytes are not there yet and come through a ring."""


class Allocation:
    """Memory of a device for one large tensor or for several small ones.

    Args:
        runtime: of the device.
        nbytes: size.
        is_streamed: whether its bytes come through a ring while workers decode.
    """

    def __init__(self, runtime: Runtime, nbytes: int, *, is_streamed: bool) -> None:
        self.runtime = runtime
        self.is_streamed = is_streamed
        self.memory = runtime.empty(_aligned(nbytes))
        self.moves: list[Move] = []
        """In the order of their offsets."""
        self.used_nbytes = 0
        """Bytes taken from its start, gaps included."""

    def has_room(self, nbytes: int) -> bool:
        """Tell whether this many more bytes fit."""
        return self.used_nbytes + nbytes <= self.memory.numel()

    def take(self, address: int, nbytes: int) -> torch.Tensor:
        """Return memory for bytes that are at an address of the host."""
        offset = self.used_nbytes
        target = self.memory[offset : offset + nbytes]
        self.moves.append(Move(address, nbytes, self.runtime, target, offset))
        self.used_nbytes += _aligned(nbytes)  # the next tensor is aligned too
        return target


class Move(NamedTuple):
    """Consecutive bytes of the host and where they go.

    It does not know its allocation: in a cycle the device's memory would wait for a collection.
    """

    address: int
    """Address of the first byte, in this process."""
    nbytes: int
    runtime: Runtime
    target: torch.Tensor
    """The device's memory for them: flat uint8."""
    offset: int
    """Offset of the first byte in the allocation, in bytes."""

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.address + self.nbytes


class Overlaps:
    """Finds the moves whose bytes lie in a range of addresses; they may overlap each other.

    Args:
        moves: to look among.
    """

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves = sorted(moves, key=lambda move: move.address)
        # The furthest end so far, for each.
        self._reach = list(itertools.accumulate((move.end for move in self._moves), max))

    def within(self, begin: int, end: int) -> Iterator[tuple[Move, int, int]]:
        """Yield the moves that overlap a range, each with the addresses of the overlap.

        Args:
            begin: address of the range's first byte.
            end: address behind its last byte.
        """
        first = bisect.bisect_right(self._reach, begin)
        for number in range(first, len(self._moves)):
            move = self._moves[number]
            if move.address >= end:
                return
            low, high = max(begin, move.address), min(end, move.end)
            if low < high:
                yield move, low, high


class _Held(NamedTuple):
    """A tensor as a module holds it."""

    holder: nn.Module
    name: str
    is_parameter: bool
    tensor: torch.Tensor
    runtime: Runtime
    """Of the device that it goes to."""
    is_streamed: bool


class Moves:
    """The copies that bring some modules' tensors to their devices.

    Allocates the targets. The modules stay as they are until `commit`.

    Args:
        modules: each with the device of each of its tensors.
        is_streamed: None if all bytes are in memory already.

    Raises:
        BytesNeeded: a streamed tensor stays on the host, or is not consecutive bytes.
        torch.OutOfMemoryError: a device is full.
    """

    def __init__(
        self,
        modules: Iterable[tuple[nn.Module, RuntimeOf]],
        is_streamed: IsStreamed | None = None,
    ) -> None:
        self.allocations: list[Allocation] = []
        self._slabs: dict[tuple[Runtime, bool], Allocation] = {}
        self._targets: dict[tuple[object, ...], torch.Tensor] = {}
        self._plain: list[tuple[_Held, torch.Tensor]] = []
        self._others: list[_Held] = []
        for module, runtime_of in modules:
            held = _held_by(module, runtime_of, is_streamed or (lambda tensor: False))
            self._add(list(held))
        streamed = (there.moves for there in self.allocations if there.is_streamed)
        self.streamed = Overlaps(itertools.chain(*streamed))
        """The moves whose bytes come through a ring."""

    @property
    def runtimes(self) -> list[Runtime]:
        """The devices that bytes are copied to."""
        return list(dict.fromkeys(there.runtime for there in self.allocations))

    @property
    def staged(self) -> list[Allocation]:
        """The allocations whose bytes are in this process's memory already."""
        return [there for there in self.allocations if not there.is_streamed]

    def commit(self) -> None:
        """Give the modules their tensors; all bytes must be there.

        Torch moves its tensors first: until that has succeeded the modules are as they were.
        """
        copies: dict[tuple[int, Runtime], torch.Tensor] = {}
        moved: dict[nn.Module, dict[int, torch.Tensor]] = {}
        for held in self._others:
            key = id(held.tensor), held.runtime
            if key not in copies:  # a shared tensor is copied once
                with torch.no_grad():
                    copies[key] = held.tensor.to(held.runtime.device)
            moved.setdefault(held.holder, {})[id(held.tensor)] = copies[key]
        made: dict[int, nn.Parameter] = {}
        for held, target in self._plain:
            if held.is_parameter:
                put(held.holder, held.name, target, made)
            else:
                held.holder._buffers[held.name] = target
        for holder, by_id in moved.items():
            swap = functools.partial(_swapped, by_id=by_id)
            holder._apply(swap, recurse=False)  # type: ignore[no-untyped-call]

    def _add(self, tensors: list[_Held]) -> None:
        """Find targets for the plain tensors of a module, and leave the others to torch.

        A device gets the memory for all large ones at once.
        """
        plain = [held for held in tensors if _is_plain(held.tensor)]
        self._others += [held for held in tensors if not _is_plain(held.tensor)]
        large: dict[Runtime, dict[tuple[object, ...], int]] = {}
        for held in plain:
            key = _key(held)
            if held.tensor.nbytes >= _LARGE_NBYTES and key not in self._targets:
                large.setdefault(held.runtime, {})[key] = _aligned(held.tensor.nbytes)
        for runtime, sizes in large.items():
            runtime.reserve(list(sizes.values()))
        self._plain += [(held, self._target(held)) for held in plain]

    def _target(self, held: _Held) -> torch.Tensor:
        """Return the device tensor that replaces a plain one; tied tensors share it."""
        key, tensor = _key(held), held.tensor
        if key not in self._targets:
            allocation = self._allocate(held.runtime, tensor.nbytes, is_streamed=held.is_streamed)
            target = allocation.take(tensor.data_ptr(), tensor.nbytes)
            self._targets[key] = target.view(tensor.dtype).view(tensor.shape)
        return self._targets[key]

    def _allocate(self, runtime: Runtime, nbytes: int, *, is_streamed: bool) -> Allocation:
        """Return an allocation that has room for this many bytes."""
        key = (runtime, is_streamed)
        is_large = nbytes >= _LARGE_NBYTES
        if not is_large and key in self._slabs and self._slabs[key].has_room(nbytes):
            return self._slabs[key]
        fresh = Allocation(runtime, nbytes if is_large else _SLAB_NBYTES, is_streamed=is_streamed)
        self.allocations.append(fresh)
        if not is_large:
            self._slabs[key] = fresh
        return fresh


def put(
    holder: nn.Module, name: str, memory: torch.Tensor, made: dict[int, nn.Parameter]
) -> nn.Parameter:
    """Give a module's parameter other memory, as `Module.to` does.

    It stays the same object, so ties and hooks stay, if torch can exchange memory of the two
    devices: between the CPU and those of CUDA, XPU, HPU, MTIA it can, and not for devices that a
    package adds. There a new parameter takes its place, in each module that holds it.

    Args:
        holder: the module.
        name: of its parameter.
        memory: with the parameter's dtype and shape.
        made: the new parameters, by the `id` of those that they replace; the new one is added. The
            caller keeps the replaced ones alive, so that no `id` is used again.

    Returns:
        The parameter that the module has now.
    """
    parameter = holder._parameters[name]
    assert parameter is not None
    if takes_data_of(parameter, memory):
        parameter.data = memory
        return parameter
    if id(parameter) not in made:
        made[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
    holder._parameters[name] = made[id(parameter)]
    return made[id(parameter)]


def _key(held: _Held) -> tuple[object, ...]:
    """Return what two plain tensors have in common that can share a target."""
    return held.tensor.data_ptr(), held.tensor.dtype, held.tensor.shape, held.runtime


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _swapped(tensor: torch.Tensor, by_id: dict[int, torch.Tensor]) -> torch.Tensor:
    return by_id.get(id(tensor), tensor)


def _held_by(module: nn.Module, runtime_of: RuntimeOf, is_streamed: IsStreamed) -> Iterator[_Held]:
    """Yield the tensors of a module and of the modules in it that go to a device.

    Raises:
        BytesNeeded: one is streamed, but stays, or is more than its bytes.
    """
    for path, holder in module.named_modules():
        for tensors, is_parameter in ((holder._parameters, True), (holder._buffers, False)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                runtime = runtime_of(f"{path}.{name}" if path else name)
                is_coming = is_streamed(tensor)
                if is_coming and (runtime is None or not _is_plain(tensor)):
                    raise BytesNeeded
                if runtime:
                    yield _Held(holder, name, is_parameter, tensor, runtime, is_coming)


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
