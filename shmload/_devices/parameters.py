"""Parameters get memory of another device."""

import torch
from torch import nn

from shmload._compat import takes_data_of


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
        made: the new parameters, by the `id` of those that they replace; this one is added. Keep
            the replaced ones alive meanwhile.

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
