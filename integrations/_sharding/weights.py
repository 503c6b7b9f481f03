"""Takes the weights out of a module, which is then made anew around parts of them."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from shmload.errors import ArgumentError
from shmload.integrations._sharding.copies import copy_to


class Weights:
    """The parameters that a module had; they keep what they are mapped from alive.

    Args:
        parameters: by all of their names.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        names: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            names[parameter].append(name)
        self.ties = tuple(tuple(tied) for tied in names.values() if len(tied) > 1)
        """The names that were those of one parameter."""

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a parameter's values, which are still where they were mapped."""
        return self._parameters[name].detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def release(self) -> None:
        """Give them up, and with the last of them the mapping and its lease."""
        self._parameters.clear()


def take_weights(module: nn.Module) -> Weights:
    """Take a module's parameters out of it, and leave such as have no memory in their place.

    Args:
        module: on the CPU, such as a component of what `load_pipeline` returns; changed in place.
            Parameters that were one stay one. Buffers stay as they are.

    Returns:
        What it had; nothing is copied.

    Raises:
        ArgumentError: it has parameters that cannot be divided; it is then as it was.
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
    """Give a module copies of its buffers that lie in mapped memory, or elsewhere on the host.

    Args:
        module: changed in place; buffers that are one stay one.
        device: where the copies are; buffers of other devices stay.
    """
    theirs = {buffer for buffer in module.buffers() if buffer.device.type == "cpu"}
    copies = dict(zip(theirs, copy_to([buffer.detach() for buffer in theirs], device), strict=True))
    for holder in module.modules():
        for key, buffer in holder._buffers.items():
            if buffer in copies:
                holder._buffers[key] = copies[buffer]


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        raise ArgumentError(f"{name} is a {type(parameter).__name__}, which is not divided by rows")
    if parameter.device.type != "cpu":
        raise ArgumentError(
            f"{name} is on {parameter.device}; shard a module whose weights are on the CPU, where "
            "load_pipeline without a device_map leaves them"
        )
