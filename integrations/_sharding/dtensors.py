"""Gives the parameters of a sharded module, DTensors without memory, their parts of the weights.

Guarantee: each process copies what is its own and nothing else, and no process waits for another.
"""

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from shmload._host.collector import paused_gc
from shmload.errors import ArgumentError
from shmload.integrations._build.pickling import register_classes
from shmload.integrations._sharding.copies import copy_to
from shmload.integrations._sharding.slices import Split, region
from shmload.integrations._sharding.weights import Weights, own_buffers


@torch.no_grad()
def fill(module: nn.Module, weights: Weights, *, device: torch.device | str | None = None) -> None:
    """Fill a module that was sharded on the meta device; without communication.

    Args:
        module: that the weights were taken from. Its parameters may be DTensors by now, of any mesh
            and with any placements that divide or repeat, as `fully_shard`, `parallelize_module`
            and `distribute_module` make them; those that are plain get all of their values. A dtype
            that was changed meanwhile stays changed. Changed in place.
        weights: from `take_weights`; they are released.
        device: where the parts shall be; None for the device of the meshes.

    Raises:
        ArgumentError: parameters are missing, have other shapes, are divided in a way that shmload
            does not know, or were one and no longer are.
    """
    hollow = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.is_meta
    }
    _require_ties(hollow, weights)
    device = torch.device(device) if device is not None else _device_of(module)
    parts: dict[nn.Parameter, torch.Tensor] = {}
    for name, parameter in hollow.items():
        if parameter not in parts:
            parts[parameter] = _part(name, parameter, weights)
    with paused_gc():
        filled = _filled(parts, device)
        state = {name: filled[parameter] for name, parameter in hollow.items()}
        # What torch's own modules know to follow: FSDP2 pads and remembers the new parameters.
        module.load_state_dict(state, strict=False, assign=True)
        own_buffers(module, device)
        # fully_shard has given them classes that their libraries do not know.
        register_classes(part for part in module.modules() if isinstance(part, FSDPModule))
    _require_filled(module)
    weights.release()


def _require_ties(hollow: dict[str, nn.Parameter], weights: Weights) -> None:
    for names in weights.ties:
        if len({hollow[name] for name in names if name in hollow}) > 1:
            raise ArgumentError(
                f"{' and '.join(names)} were one parameter and are {len(names)} since the module "
                "was sharded; shard them together, in the nearest module that has them all"
            )


def _require_filled(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            raise ArgumentError(f"{name} cannot be set by load_state_dict; fill it by hand")


def _device_of(module: nn.Module) -> torch.device:
    """Return where the parts of a module belong: this process's device of its mesh."""
    kinds = (p.device_mesh.device_type for p in module.parameters() if isinstance(p, DTensor))
    return torch.device(next(kinds, "cpu"))


# Parts --------------------------------------------------------------------------------------------


def _part(name: str, parameter: nn.Parameter, weights: Weights) -> torch.Tensor:
    """Return a view of what this process has of a parameter."""
    if name not in weights:
        raise ArgumentError(f"{name} was not there when the weights were taken; fill it by hand")
    weight = weights[name]
    if weight.shape != parameter.shape:
        raise ArgumentError(
            f"{name} has shape {tuple(parameter.shape)}, and {tuple(weight.shape)} when the "
            "weights were taken"
        )
    if not isinstance(parameter, DTensor):
        return weight
    shape = parameter.to_local().shape
    try:
        part = weight[region(weight.shape, _splits(parameter)).slices]
    except ValueError as exc:
        raise ArgumentError(f"{name} has placements {parameter.placements}: {exc}") from exc
    if part.numel() == 0 == shape.numel():
        return weight.new_empty(shape)
    if part.shape != shape:
        raise ArgumentError(
            f"{name} has placements {parameter.placements}: this process has {tuple(shape)} of it, "
            f"and not {tuple(part.shape)}, as they say"
        )
    return part


def _splits(parameter: DTensor) -> list[Split]:
    """Return how a parameter is divided.

    Raises:
        ValueError: that is not known here.
    """
    mesh = parameter.device_mesh
    # Not get_coordinate(): torch may keep the mesh of an earlier process group, with another rank.
    places = (mesh.mesh == torch.distributed.get_rank()).nonzero().tolist()
    if not places:
        raise ValueError("this process is not in their mesh")
    (place,) = places
    splits = []
    for number, placement in enumerate(parameter.placements):
        # The class of FSDP over tensor parallelism is torch's own business, and no Shard in 2.13.
        shards = getattr(placement, "split_factor", None)
        if isinstance(placement, Shard) or shards is not None:
            dim: int = placement.dim  # type: ignore[attr-defined]
            splits.append(Split(dim, mesh.size(number), place[number], shards))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{placement} neither divides nor repeats")
    return splits


# Filling ------------------------------------------------------------------------------------------


def _filled(
    parts: dict[nn.Parameter, torch.Tensor], device: torch.device
) -> dict[nn.Parameter, nn.Parameter]:
    """Return parameters like those without memory, with the parts as their values."""
    if device.type == "cpu":
        made = [_copied(parameter, part) for parameter, part in parts.items()]
    else:
        copies = copy_to(list(parts.values()), device)
        made = [
            _wrapped(parameter, copy.to(parameter.dtype))
            for parameter, copy in zip(parts, copies, strict=True)
        ]
    return {
        parameter: nn.Parameter(value, parameter.requires_grad)
        for parameter, value in zip(parts, made, strict=True)
    }


def _copied(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Copy a part on the host, also for a mesh of devices whose weights wait there."""
    value = torch.empty_like(parameter, device="cpu")
    (value.to_local() if isinstance(value, DTensor) else value).copy_(part)
    return value


def _wrapped(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
