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
from shmload._runtimes.runtime import ALIGNMENT_NBYTES, Runtime

# Smaller tensors share an allocation of this size: thousands of them would cost more to allocate
# and to copy than their bytes do. A larger one has its own, which is free again when the tensor is.
_SLAB_NBYTES = 1 << 20
_LARGE_NBYTES = _SLAB_NBYTES // 2

RuntimeOf = Callable[[str], Runtime | None]
"""Returns the device of a tensor by the tensor's path; None to leave it where it is."""


class Move(NamedTuple):
    """Consecutive bytes of this process, and the memory of a device that they go to."""

    address: int
    """Where its first byte is."""
    nbytes: int
    runtime: Runtime
    """The device."""
    memory: torch.Tensor
    """An allocation of the device: flat uint8."""
    offset: int
    """Where the bytes begin in it, in bytes."""

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.address + self.nbytes

    @property
    def target(self) -> torch.Tensor:
        """The bytes on the device."""
        return self.memory[self.offset : self.offset + self.nbytes]

    def cut(self, begin: int, end: int) -> "Move":
        """Return the move of those bytes that lie between two addresses."""
        low, high = max(begin, self.address), min(end, self.end)
        offset = self.offset + low - self.address
        return Move(low, high - low, self.runtime, self.memory, offset)


class Overlaps:
    """Finds the moves whose bytes lie in a range of addresses; they may overlap each other.

    Args:
        moves: to look among.
    """

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves = sorted(moves, key=lambda move: move.address)
        # The furthest end so far, for each.
        self._reach = list(itertools.accumulate((move.end for move in self._moves), max))

    def within(self, begin: int, end: int) -> Iterator[Move]:
        """Yield the moves that overlap a range, each cut to the range.

        Args:
            begin: address of the range's first byte.
            end: address behind its last byte.
        """
        first = bisect.bisect_right(self._reach, begin)
        for number in range(first, len(self._moves)):
            move = self._moves[number]
            if move.address >= end:
                return
            if move.end > begin:
                yield move.cut(begin, end)


class _Held(NamedTuple):
    """A tensor as a module holds it."""

    holder: nn.Module
    name: str
    is_parameter: bool
    tensor: torch.Tensor
    runtime: Runtime
    """The runtime of the device that it goes to."""


class Moves:
    """The copies that bring some modules' tensors to their devices.

    Allocates the targets. The modules stay as they are until `commit`.

    Args:
        modules: each with the device of each of its tensors.

    Raises:
        torch.OutOfMemoryError: a device is full.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, RuntimeOf]]) -> None:
        self.moves: list[Move] = []
        """Those of small tensors first, which share allocations; else in the order of addresses."""
        self.others: list[torch.Tensor] = []
        """The tensors that stay where they are, or that torch moves."""
        self._slabs: dict[Runtime, Move] = {}  # of each device the last small one
        self._targets: dict[tuple[object, ...], torch.Tensor] = {}
        self._plain: list[tuple[_Held, torch.Tensor]] = []
        self._moved: list[_Held] = []
        for module, runtime_of in modules:
            self._add(self._held_by(module, runtime_of))
        self.moves.sort(key=lambda move: move.nbytes >= _LARGE_NBYTES)

    @property
    def runtimes(self) -> list[Runtime]:
        """The devices that bytes are copied to."""
        return list(dict.fromkeys(move.runtime for move in self.moves))

    def commit(self) -> None:
        """Give the modules their tensors; all bytes must be there.

        Torch moves its tensors first: until that has succeeded the modules are as they were.
        """
        copies: dict[tuple[int, Runtime], torch.Tensor] = {}
        moved: dict[nn.Module, dict[int, torch.Tensor]] = {}
        for held in self._moved:
            key = id(held.tensor), held.runtime
            if key not in copies:  # a shared tensor is copied once
                with torch.no_grad():
                    copies[key] = _copied(held.tensor, held.runtime)
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

    def _held_by(self, module: nn.Module, runtime_of: RuntimeOf) -> list[_Held]:
        """Return the tensors of a module and of the modules in it that this copies itself."""
        plain = []
        for path, holder in module.named_modules():
            for tensors, is_parameter in ((holder._parameters, True), (holder._buffers, False)):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    runtime = runtime_of(f"{path}.{name}" if path else name)
                    if runtime and _is_plain(tensor):
                        plain.append(_Held(holder, name, is_parameter, tensor, runtime))
                        continue
                    self.others.append(tensor)
                    if runtime:
                        self._moved.append(_Held(holder, name, is_parameter, tensor, runtime))
        return plain

    def _add(self, plain: list[_Held]) -> None:
        """Find targets for the tensors of a module.

        A device gets the memory for all large ones at once.
        """
        plain.sort(key=lambda held: held.tensor.data_ptr())
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
            memory, offset = self._allocate(held.runtime, tensor.nbytes)
            move = Move(tensor.data_ptr(), tensor.nbytes, held.runtime, memory, offset)
            self.moves.append(move)
            if move.nbytes < _LARGE_NBYTES:
                self._slabs[held.runtime] = move
            self._targets[key] = move.target.view(tensor.dtype).view(tensor.shape)
        return self._targets[key]

    def _allocate(self, runtime: Runtime, nbytes: int) -> tuple[torch.Tensor, int]:
        """Return memory of a device that has room for so many bytes, and where they begin in it."""
        if nbytes >= _LARGE_NBYTES:
            return runtime.empty(_aligned(nbytes)), 0
        if last := self._slabs.get(runtime):
            offset = _aligned(last.offset + last.nbytes)
            if offset + nbytes <= last.memory.numel():
                return last.memory, offset
        return runtime.empty(_SLAB_NBYTES), 0


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


def _copied(tensor: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    """Return a tensor's copy on a device, by torch."""
    return (tensor.clone() if runtime.is_integrated else tensor).to(runtime.device)


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
