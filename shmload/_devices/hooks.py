"""Hooks on a model: they move activations between the devices of one pipeline.

Weights that stay on a device are there before. `waiting` brings those that wait on the host, and
accelerate those that wait on a disk.
"""

import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from shmload._devices.moves import put
from shmload._devices.origin import Segments
from shmload._devices.waiting import Waiting
from shmload._placement.inventory import CPU, DISK, OFFLOAD, WAITING
from shmload._wording import format_nbytes, logger_of
from shmload.errors import ArgumentError

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
        _dispatch(model, devices, execution_device, offload_folder)
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

    skip_keys = _skip_keys_of(model)
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
            "%s: %s of weights wait in no segment and are copied more slowly; load_pipeline and "
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


# Weights that wait under accelerate's own hooks: on a disk, or of a class of their own ------------


def _dispatch(
    model: nn.Module,
    devices: Mapping[str, str],
    execution_device: str,
    offload_folder: str | os.PathLike[str] | None,
) -> None:
    """Have accelerate bring the weights that wait, and move activations.

    Args:
        model: with its other tensors on their devices.
        devices: by a module's path, complete and disjoint; the empty path is the model itself.
        execution_device: where modules compute whose weights wait.
        offload_folder: for weights that wait on a disk.

    Raises:
        ArgumentError: as for `attach_hooks`.
    """
    from accelerate import dispatch_model

    if DISK in devices.values() and offload_folder is None:
        raise ArgumentError("some weights wait on a disk; give `offload_folder`")
    if execution_device != CPU and CPU in devices.values():
        raise ArgumentError(
            "accelerate cannot compute some modules of a model on the CPU and others on an "
            "accelerator while weights wait; use 'offload' instead of 'cpu' for its modules"
        )
    with warnings.catch_warnings():
        # It wants a device for each name of a tied module, and warns of all names but the first.
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        dispatch_model(
            model,
            _as_accelerate(model, devices, execution_device),
            main_device=execution_device,
            offload_dir=_own_folder(model, offload_folder) if DISK in devices.values() else None,
            skip_keys=_skip_keys_of(model),
            force_hooks=True,
        )


def _as_accelerate(
    model: nn.Module, devices: Mapping[str, str], execution_device: str
) -> dict[str, str]:
    """Return a device map as accelerate wants it.

    There weights wait on `cpu`, and a model that waits whole is named by its children.
    """
    renamed = dict(devices)
    if renamed.get("") in WAITING:
        own = dict.fromkeys((*model._parameters, *model._buffers), execution_device)
        renamed = own | dict.fromkeys((name for name, _ in model.named_children()), renamed[""])
    return {path: CPU if device == OFFLOAD else device for path, device in renamed.items()}


def _own_folder(model: nn.Module, parent: str | os.PathLike[str] | None) -> str:
    """Make a folder that is removed with the model.

    Each model needs its own: accelerate writes no weights into a folder that has some.
    """
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="shmload-offload-", dir=parent)
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _skip_keys_of(model: nn.Module) -> Any:
    """Return the names of arguments that are not moved; the libraries have two names for this."""
    keys = getattr(model, "_skip_keys", None)
    return keys or getattr(model, "_skip_keys_device_placement", None)
