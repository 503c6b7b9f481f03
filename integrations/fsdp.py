"""Shards a model over ranks: each rank holds its slices of the weights and no more.

The weights stay in the shared segments that they were loaded into. The model is sharded without
them, on the meta device. Then each rank copies its slice of every tensor to its device, and
detaches the segments.

Guarantee: no rank has the whole model in private or device memory, and no rank waits for another.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shmload._runtimes.kinds import machine_kind
from shmload._sharding.groups import Blocks, find_groups
from shmload._sharding.weights import Weights, take_weights
from shmload.errors import ArgumentError, LibraryTooOld
from shmload.integrations.diffusers import load_pipeline

try:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
except ImportError as exc:
    if exc.name != "torch.distributed.fsdp":  # it is there, and cannot be imported
        raise
    raise LibraryTooOld("torch", torch.__version__, "2.6", "fully_shard") from exc

from shmload._sharding.dtensors import fill

__all__ = ["Weights", "fill", "find_groups", "load_sharded", "shard", "take_weights"]


def load_sharded(
    source: str | os.PathLike[str],
    component: str,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Blocks | None = None,
    sharding: Mapping[str, Any] | None = None,
    **load_kwargs: Any,
) -> nn.Module:
    """Load one model of a pipeline, sharded over the ranks of a mesh.

    Each rank calls it. No other model of the pipeline is read.

    Args:
        source: as for `load_pipeline`.
        component: the model's name in the pipeline, such as `transformer`.
        mesh: as for `shard`.
        blocks: as for `shard`.
        sharding: arguments for `fully_shard`.
        load_kwargs: arguments for `load_pipeline`: `dtype`, `variant` and so on. Among the
            ranks of a launcher one decodes and the others attach; elsewhere give `share=True`.

    Returns:
        The model, as `shard` returns it.

    Raises:
        UnknownComponent: the pipeline has no such model.
        ShmloadError: what `load_pipeline` and `shard` raise.
    """
    if load_kwargs.get("device_map") is not None:
        raise ArgumentError("device_map is for whole models; the mesh decides where shards go")
    pipe = load_pipeline(source, components=[component], **load_kwargs)
    return shard(getattr(pipe, component), mesh, blocks=blocks, **(sharding or {}))


def shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Blocks | None = None,
    **sharding: Any,
) -> nn.Module:
    """Shard a module whose weights are mapped; without communication.

    Args:
        module: on the CPU, such as a component of what `load_pipeline` returns; changed in place.
            Discard it if this raises: it may have lost its weights.
        mesh: the ranks, as for `fully_shard`; None for all of the process group, on CUDA devices
            where there are any.
        blocks: classes of modules, or their names. Each such module is gathered by itself when it
            computes. None for the classes in the model's `_no_split_modules`; a model without any
            is gathered whole. Modules of another dtype than their block's are gathered separately.
        sharding: arguments for `fully_shard`, the same for all blocks and the rest. The parameters
            that `shard_placement_fn` gets are on the meta device.

    Returns:
        The module. Its parameters are DTensors; ties, dtypes and `requires_grad` are as before, and
        no tensor is mapped any more. It is gathered for `forward`; for other methods use torch's
        `register_fsdp_forward_method`.

    Raises:
        ArgumentError: the module cannot be sharded by these blocks, or no process group exists.
        Exception: what `fully_shard` raises.
    """
    mesh = mesh if mesh is not None else _mesh_of_all()
    groups = find_groups(module, blocks)
    ignored = _names_of(module, sharding.pop("ignored_params", None) or ())
    weights = take_weights(module)
    hollow = dict(module.named_parameters(remove_duplicate=False))
    if ignored:
        sharding["ignored_params"] = {hollow[name] for name in ignored}
    for group in groups:
        fully_shard(group, mesh=mesh, **sharding)
    waits = isinstance(sharding.get("offload_policy"), CPUOffloadPolicy)
    fill(module, weights, device="cpu" if waits else None)
    return module


def _names_of(module: nn.Module, ignored: Any) -> set[str]:
    """Return the names of the parameters that are not sharded: those given, and scalars."""
    return {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.ndim == 0 or any(parameter is other for other in ignored)
    }


def _mesh_of_all() -> DeviceMesh:
    if not torch.distributed.is_initialized():
        raise ArgumentError(
            "no process group exists; call torch.distributed.init_process_group first, in a "
            "process that torchrun started"
        )
    return init_device_mesh(machine_kind() or "cpu", (torch.distributed.get_world_size(),))
