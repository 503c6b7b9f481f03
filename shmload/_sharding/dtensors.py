"""Gives the parameters of a sharded module, DTensors on the meta device, their values.

Guarantee: each process copies its own slices and nothing else, and waits for no other process.
"""

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from shmload._building.structure import register_classes
from shmload._host.collector import paused_gc
from shmload._sharding.weights import (
    Split,
    Weights,
    copy_to,
    own_buffers,
    slice_of,
)
from shmload.errors import ArgumentError


@torch.no_grad()
def fill(module: nn.Module, weights: Weights, *, device: torch.device | str | None = None) -> None:
    """Fill a module that was sharded on the meta device; without communication.

    Args:
        module: the one that the weights were taken from, changed in place. Its parameters may now
            be DTensors, of any mesh and with any placements that shard or replicate, as
            `fully_shard`, `parallelize_module` and `distribute_module` make them. Plain parameters
            get the whole weight. A parameter keeps the dtype that it has now.
        weights: from `take_weights`; released here.
        device: of the slices; None for the device of the meshes.

    Raises:
        ArgumentError: a parameter has no weight or another shape, has a placement that shmload
            does not know, or was tied and no longer is.
    """
    hollow = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.is_meta
    }
    _require_ties(hollow, weights)
    device = torch.device(device) if device is not None else _device_of(module)
    slices: dict[nn.Parameter, torch.Tensor] = {}
    for name, parameter in hollow.items():
        if parameter not in slices:
            slices[parameter] = _slice(name, parameter, weights)
    with paused_gc():
        filled = _filled(slices, device)
        state = {name: filled[parameter] for name, parameter in hollow.items()}
        # The one way that FSDP2 follows: it pads the new parameters and keeps track of them.
        module.load_state_dict(state, strict=False, assign=True)
        own_buffers(module, device)
        # fully_shard has changed their classes to ones that their libraries do not know.
        register_classes(held for held in module.modules() if isinstance(held, FSDPModule))
    _require_filled(module)
    weights.release()


def _require_ties(hollow: dict[str, nn.Parameter], weights: Weights) -> None:
    for names in weights.ties:
        if len({hollow[name] for name in names if name in hollow}) > 1:
            raise ArgumentError(
                f"{' and '.join(names)} were one parameter, and sharding made them several; shard "
                "them together, in the nearest module that has them all"
            )


def _require_filled(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            raise ArgumentError(f"{name} cannot be set by load_state_dict; fill it yourself")


def _device_of(module: nn.Module) -> torch.device:
    """Return the kind of device of a module's meshes; the CPU if it has none."""
    kinds = (p.device_mesh.device_type for p in module.parameters() if isinstance(p, DTensor))
    return torch.device(next(kinds, "cpu"))


# Slices -------------------------------------------------------------------------------------------


def _slice(name: str, parameter: nn.Parameter, weights: Weights) -> torch.Tensor:
    """Return a view of this process's slice of a parameter's weight."""
    if name not in weights:
        raise ArgumentError(f"{name} did not exist when the weights were taken; fill it yourself")
    weight = weights[name]
    if weight.shape != parameter.shape:
        raise ArgumentError(
            f"{name} has shape {tuple(parameter.shape)}; it had {tuple(weight.shape)} when the "
            "weights were taken"
        )
    if not isinstance(parameter, DTensor):
        return weight
    shape = parameter.to_local().shape
    try:
        view = weight[slice_of(weight.shape, _splits(parameter))]
    except ValueError as exc:
        raise ArgumentError(f"{name} has placements {parameter.placements}: {exc}") from exc
    if view.numel() == 0 == shape.numel():
        return weight.new_empty(shape)
    if view.shape != shape:
        raise ArgumentError(
            f"{name} has placements {parameter.placements}: by them this process has "
            f"{tuple(view.shape)} of it, but torch gave it {tuple(shape)}"
        )
    return view


def _splits(parameter: DTensor) -> list[Split]:
    """Return how the mesh divides a parameter.

    Raises:
        ValueError: this process is not in the mesh, or a placement neither shards nor replicates.
    """
    mesh = parameter.device_mesh
    # Not get_coordinate(): torch may keep the mesh of an earlier process group, with another rank.
    coordinates = (mesh.mesh == torch.distributed.get_rank()).nonzero().tolist()
    if not coordinates:
        raise ValueError("this process is not in their mesh")
    (coordinate,) = coordinates
    splits = []
    for number, placement in enumerate(parameter.placements):
        # FSDP over tensor parallelism has a private class in torch, which is no Shard in 2.13.
        shards = getattr(placement, "split_factor", None)
        if isinstance(placement, Shard) or shards is not None:
            dim: int = placement.dim  # type: ignore[attr-defined]
            splits.append(Split(dim, mesh.size(number), coordinate[number], shards))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{placement} neither shards nor replicates")
    return splits


# Filling ------------------------------------------------------------------------------------------


def _filled(
    slices: dict[nn.Parameter, torch.Tensor], device: torch.device
) -> dict[nn.Parameter, nn.Parameter]:
    """Return a parameter with its slice as its value, for each parameter without memory."""
    if device.type == "cpu":
        made = [_copied(parameter, view) for parameter, view in slices.items()]
    else:
        copies = copy_to(list(slices.values()), device)
        made = [_wrapped(*pair) for pair in zip(slices, copies, strict=True)]
    return {
        parameter: nn.Parameter(value, parameter.requires_grad)
        for parameter, value in zip(slices, made, strict=True)
    }


def _copied(parameter: nn.Parameter, view: torch.Tensor) -> torch.Tensor:
    """Copy a slice on the host; the mesh may be of accelerators whose weights wait there."""
    value = torch.empty_like(parameter, device="cpu")
    (value.to_local() if isinstance(value, DTensor) else value).copy_(view)
    return value


def _wrapped(parameter: nn.Parameter, copy: torch.Tensor) -> torch.Tensor:
    local = copy.to(parameter.dtype)
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
