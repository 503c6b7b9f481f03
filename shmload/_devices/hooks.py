"""Hooks on a model: they move activations between the devices of one pipeline.

Weights that stay on a device are there before. `waiting` brings those that wait on the host, and
accelerate those that wait on a disk.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from shmload._devices.dispatch import dispatch, skip_keys_of
from shmload._devices.origin import Segments
from shmload._devices.parameters import put
from shmload._devices.waiting import Waiting
from shmload._placement.inventory import CPU, DISK, OFFLOAD
from shmload._placement.table import WAITING
from shmload._wording import format_nbytes, logger_of

logger = logger_of(__name__)


class Blocks(NamedTuple):
    """The blocks of a model whose weights wait on the host for an accelerator."""

    waiting: Waiting
    """Brings them to the accelerator."""
    paths: Collection[str]
    """Of all modules of the model that travel as a block if their weights wait."""
    segments: Segments
    """Hold the weights, or some of them."""


def attach_hooks(
    model: nn.Module,
    devices: Mapping[str, str],
    execution_device: str,
    offload_folder: str | os.PathLike[str] | None = None,
    *,
    blocks: Blocks | None = None,
) -> None:
    """Have a model take inputs from any device, and return its outputs on the same device.

    Args:
        model: with its tensors on their devices.
        devices: by a module's path, complete and disjoint; the empty path is the model itself.
        execution_device: where its inputs go, and where modules compute whose weights wait.
        offload_folder: for weights that wait on a disk.
        blocks: for weights that wait on the host. None, or a weight that is more than consecutive
            bytes: accelerate brings them.

    Raises:
        ArgumentError: weights wait on a disk and no folder is given; or accelerate is to bring
            weights to an accelerator, and some modules compute on the CPU.
    """
    if not any(device in WAITING for device in devices.values()):
        _align(model, devices, execution_device)
    elif blocks and DISK not in devices.values() and _are_plain(model):
        roots = _roots(model, devices, blocks)
        _align(model, devices, execution_device, blocks.waiting, roots)
    else:
        dispatch(model, devices, execution_device, offload_folder)
    note_devices(model, devices)


def note_devices(model: nn.Module, devices: Mapping[str, str]) -> None:
    """Set `hf_device_map`, where the libraries look up the devices of a model's modules."""
    model.__dict__["hf_device_map"] = dict(devices)


def device_at(devices: Mapping[str, str], path: str, otherwise: str) -> str:
    """Return the device of a module or tensor: its own, or that of the nearest module above it.

    Args:
        devices: by path.
        path: of the module or tensor.
        otherwise: returned for a module that lies above all of `devices`.
    """
    while path not in devices:
        if not path:
            return otherwise
        path = path.rpartition(".")[0]
    return devices[path]


def _align(
    model: nn.Module,
    devices: Mapping[str, str],
    execution_device: str,
    waiting: Waiting | None = None,
    roots: Mapping[nn.Module, nn.Module] = MappingProxyType({}),
) -> None:
    """Add a hook to every module that has a tensor in or below it.

    The model's own hook is not enough, because pipelines call more than `forward`: a decoder's
    inputs come by `decode`. Nor is that of a block: its modules can be called without it.

    Args:
        model: as for `attach_hooks`, and so are the next two.
        devices: of its modules.
        execution_device: of its inputs.
        waiting: brings the weights of blocks; None if there are none.
        roots: the block of each module that is in one.
    """
    from shmload._devices.aligning import (
        ActivationsHook,
        ModelHook,
        WaitingHook,
        add_hook,
    )

    skip_keys = skip_keys_of(model)
    for path, module in _with_tensors(model):
        name = device_at(devices, path, execution_device)
        if waiting and name in (OFFLOAD, execution_device):
            device = waiting.runtime.device
        else:
            device = torch.device(name)
        others = {"io_same_device": not path, "skip_keys": skip_keys}
        root = roots.get(module)
        if waiting and root is not None and (root is module or module._parameters):
            add_hook(module, WaitingHook(device, waiting, root, **others))
        elif waiting and not path and CPU not in devices.values():
            add_hook(module, ModelHook(device, **others))
        else:
            add_hook(module, ActivationsHook(device, **others))
        if name == OFFLOAD:
            _bring_rest(module, device, is_in_block=root is not None)


def _bring_rest(module: nn.Module, device: torch.device, *, is_in_block: bool) -> None:
    """Move a waiting module's own tensors that do not travel: buffers, and what is in no block."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
    for name, parameter in () if is_in_block else list(module._parameters.items()):
        if parameter is not None:
            put(module, name, parameter.data.to(device), {})


def _roots(
    model: nn.Module, devices: Mapping[str, str], blocks: Blocks
) -> dict[nn.Module, nn.Module]:
    """Note the blocks that wait; returns the block of each module in one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    roots: dict[nn.Module, nn.Module] = {}
    elsewhere = 0
    for path in blocks.paths:
        root = modules.get(path)
        if root is None or root in roots or device_at(devices, path, "") != OFFLOAD:
            continue
        for module in root.modules():
            roots.setdefault(module, root)
        origins = blocks.segments.origins(root.parameters())
        blocks.waiting.add(root, origins)
        here = (p for p in root.parameters() if p.is_cpu)
        elsewhere += sum(p.nbytes for p in here if not any(o.holds(p) for o in origins))
    if elsewhere:
        logger.info(
            "%s: %s of weights wait in no segment and are copied unpinned; load_pipeline and "
            "load_model make segments of all weights with keep=True",
            type(model).__name__,
            format_nbytes(elsewhere),
        )
    return roots


def _are_plain(model: nn.Module) -> bool:
    """Tell whether parameters are of torch's own class: others are more than their bytes."""
    return all(type(parameter) is nn.Parameter for parameter in model.parameters())


def _with_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have a tensor in or below them, each with its path."""
    paths = {""}
    for path, module in model.named_modules():
        if any(
            tensor is not None
            for tensor in (*module._parameters.values(), *module._buffers.values())
        ):
            while path not in paths:
                paths.add(path)
                path = path.rpartition(".")[0]
    return ((path, module) for path, module in model.named_modules() if path in paths)
