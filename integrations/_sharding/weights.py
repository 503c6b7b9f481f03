"""Takes the weights out of a module, so that it can be sharded without memory."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from shmload.errors import ArgumentError
from shmload.integrations._sharding.copies import copy_to


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
