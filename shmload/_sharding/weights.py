"""The weights of a module: taken out of it, sliced, and copied to a device.

Guarantee: slices are computed from shapes alone, so ranks agree without communication. The slices
of all ranks, without replicas, are the whole tensor, each element once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shmload._building.placing import to_device
from shmload._runtimes import kinds
from shmload.errors import ArgumentError


class Weights:
    """The parameters that a module had; they keep the segments that they lie in mapped.

    Args:
        parameters: by all of their names.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        names: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            names[parameter].append(name)
        self.ties = tuple(tuple(tied) for tied in names.values() if len(tied) > 1)
        """For each tied parameter, its names."""

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a parameter's values, which still lie in the mapping."""
        return self._parameters[name].detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def release(self) -> None:
        """Drop the parameters; the mapping and its lease go with the last tensor in it."""
        self._parameters.clear()


def take_weights(module: nn.Module) -> Weights:
    """Replace a module's parameters by ones without memory, and return the weights.

    Args:
        module: on the CPU, such as a component of what `load_pipeline` returns; changed in place.
            Tied parameters stay tied. Buffers stay as they are.

    Returns:
        The parameters that it had; nothing is copied.

    Raises:
        ArgumentError: a parameter cannot be sharded; the module is then as it was.
    """
    taken = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in taken.items():
        _require_plain(name, parameter)
    hollow = {
        parameter: nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in taken.values()
    }
    for holder in module.modules():
        for key, held in holder._parameters.items():
            if held is not None:
                holder._parameters[key] = hollow[held]
    return Weights(taken)


def own_buffers(module: nn.Module, device: torch.device) -> None:
    """Replace a module's buffers on the CPU, mapped or not, by copies of its own.

    Args:
        module: changed in place; buffers that are one tensor stay one.
        device: of the copies. Buffers that are not on the CPU stay.
    """
    on_host = {buffer for buffer in module.buffers() if buffer.device.type == "cpu"}
    copied = copy_to([buffer.detach() for buffer in on_host], device)
    copies = dict(zip(on_host, copied, strict=True))
    for holder in module.modules():
        for key, buffer in holder._buffers.items():
            if buffer in copies:
                holder._buffers[key] = copies[buffer]


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        raise ArgumentError(f"{name} is a {type(parameter).__name__}, which cannot be sharded")
    if parameter.device.type != "cpu":
        raise ArgumentError(
            f"{name} is on {parameter.device}; shard a module whose weights are on the CPU, where "
            "load_pipeline without a device_map leaves them"
        )


# Slices -------------------------------------------------------------------------------------------


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


def divide(size: int, count: int, index: int) -> tuple[int, int]:
    """Divide a dimension as `torch.chunk`, DTensor and FSDP2 do, and ZeRO-3 a flat tensor.

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


def slice_of(shape: Sequence[int], splits: Iterable[Split]) -> tuple[slice, ...]:
    """Return a rank's slice of a tensor, as the index that gives a view of it.

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
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


# Copies -------------------------------------------------------------------------------------------


def copy_to(slices: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy views of mapped tensors to a device; blocks until all are there.

    Contiguous views go to an accelerator in bulk, through a ring of pinned memory. Each other view
    is copied by itself, with one copy at most on the host at a time.

    Args:
        slices: on the CPU.
        device: without an index, the process's current one of its kind.

    Returns:
        Contiguous tensors, in the same order.
    """
    if not kinds.takes_copies(device.type):
        return [_copied(view, device) for view in slices]
    if device.index is None:
        device = torch.device(device.type, kinds.module_of(device.type).current_device())
    carrier = nn.Module()
    for number, view in enumerate(slices):
        if view.is_contiguous() and view.numel():
            carrier.register_buffer(str(number), view)
    if carrier._buffers:
        to_device(carrier, str(device))
    in_bulk = carrier._buffers
    copies = ((in_bulk.get(str(number)), view) for number, view in enumerate(slices))
    return [_copied(view, device) if copy is None else copy for copy, view in copies]


def _copied(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(view.shape, dtype=view.dtype, device=device).copy_(view)
