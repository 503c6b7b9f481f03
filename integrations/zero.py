"""Divides a module's parameters as ZeRO-3 does: each is a flat row, of which each rank has a part.

For frameworks that gather parameters themselves. Nothing here waits for another rank.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from shmload._host.collector import paused_gc
from shmload.errors import ArgumentError
from shmload.integrations._sharding.copies import copy_to
from shmload.integrations._sharding.slices import share
from shmload.integrations._sharding.weights import own_buffers, take_weights


class Partition(NamedTuple):
    """A rank's part of one parameter."""

    tensor: torch.Tensor
    """Flat, with the parameter's dtype, and equally long on all ranks; memory of its own."""
    shape: torch.Size
    """Of the parameter."""
    begin: int
    """Where the part begins in the flat parameter, in elements."""
    padding: int
    """How many zeros at its end are not the parameter's."""
    requires_grad: bool
    """Of the parameter."""

    def assemble(self, gathered: torch.Tensor) -> torch.Tensor:
        """Make the parameter from all ranks' parts.

        Args:
            gathered: the parts in the order of the ranks, flat, as `all_gather_into_tensor` gives
                them.

        Returns:
            A view of it.
        """
        return gathered[: math.prod(self.shape)].view(self.shape)


@torch.no_grad()
def partition(
    module: nn.Module, rank: int, world_size: int, *, device: torch.device | str = "cpu"
) -> dict[str, Partition]:
    """Take a module's weights out of it, and return one rank's part of them.

    Args:
        module: as for `take_weights`; its parameters are on the meta device afterwards, and its
            buffers copies on the device.
        rank: of this process.
        world_size: how many ranks there are.
        device: where the parts shall be.

    Returns:
        The parts by the parameters' names. One with several names is the same object for each.

    Raises:
        ArgumentError: there is no such rank; as for `take_weights`.
    """
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} is none of {world_size} ranks, which count from 0")
    device = torch.device(device)
    weights = take_weights(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names: dict[nn.Parameter, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(parameter, name)
    shares = {name: share(weights[name].shape, world_size, rank) for name in names.values()}
    with paused_gc():
        copies = copy_to(
            [weights[name].reshape(-1)[at.begin : at.end] for name, at in shares.items()], device
        )
        own_buffers(module, device)
    weights.release()
    parts = {
        parameter: Partition(
            tensor=nn.functional.pad(copy, (0, at.padding)) if at.padding else copy,
            shape=parameter.shape,
            begin=at.begin,
            padding=at.padding,
            requires_grad=parameter.requires_grad,
        )
        for parameter, at, copy in zip(names, shares.values(), copies, strict=True)
    }
    return {name: parts[parameter] for name, parameter in parameters.items()}
