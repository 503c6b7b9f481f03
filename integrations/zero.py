"""Divides a module's parameters as ZeRO-3 does: each rank keeps a slice of each flat parameter.

For frameworks that gather parameters themselves. No rank waits for another.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from shmload._host.collector import paused_gc
from shmload._sharding.weights import copy_to, divide, own_buffers, take_weights
from shmload.errors import ArgumentError


class Partition(NamedTuple):
    """A rank's slice of one flat parameter."""

    tensor: torch.Tensor
    """The slice: flat, of the parameter's dtype, as long on all ranks; has its own memory."""
    shape: torch.Size
    """Shape of the whole parameter."""
    begin: int
    """Offset of the slice in the flat parameter, in elements."""
    padding: int
    """Number of zeros at the end of `tensor` that are not the parameter's."""
    requires_grad: bool
    """The parameter's `requires_grad`."""

    def assemble(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter from the slices of all ranks.

        Args:
            gathered: the slices in the order of the ranks, flat, as `all_gather_into_tensor` gives
                them.

        Returns:
            A view of `gathered`.
        """
        return gathered[: math.prod(self.shape)].view(self.shape)


@torch.no_grad()
def partition(
    module: nn.Module, rank: int, world_size: int, *, device: torch.device | str = "cpu"
) -> dict[str, Partition]:
    """Take a module's weights out of it, and return one rank's slices of them.

    Args:
        module: as for `take_weights`; its parameters are on the meta device afterwards, and its
            buffers are copies on the device.
        rank: of this process.
        world_size: how many ranks there are.
        device: of the slices.

    Returns:
        The slices by the parameters' names. A tied parameter has the same object for each name.

    Raises:
        ArgumentError: the rank does not exist, or `take_weights` refuses the module.
    """
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} is not one of {world_size} ranks, which count from 0")
    device = torch.device(device)
    weights = take_weights(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = {parameter: name for name, parameter in parameters.items()}
    slices = [divide(parameter.numel(), world_size, rank) for parameter in names]
    with paused_gc():
        copies = copy_to(
            [
                weights[name].reshape(-1)[begin : begin + size]
                for name, (begin, size) in zip(names.values(), slices, strict=True)
            ],
            device,
        )
        own_buffers(module, device)
    weights.release()
    partitions = {}
    for parameter, (begin, size), copy in zip(names, slices, copies, strict=True):
        padding = -(-parameter.numel() // world_size) - size
        partitions[parameter] = Partition(
            tensor=nn.functional.pad(copy, (0, padding)) if padding else copy,
            shape=parameter.shape,
            begin=begin,
            padding=padding,
            requires_grad=parameter.requires_grad,
        )
    return {name: partitions[parameter] for name, parameter in parameters.items()}
