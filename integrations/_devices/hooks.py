"""What moves activations between the devices of one pipeline: accelerate's hooks.

The weights are in their places already. Where some of them wait on the CPU or on a disk,
accelerate brings them to the device that computes, a module at a time.
"""

import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shmload._placement.inventory import CPU, DISK, OFFLOAD
from shmload._placement.table import WAITING
from shmload.errors import ArgumentError


def attach_hooks(
    model: nn.Module,
    devices: Mapping[str, str],
    execution_device: str,
    offload_folder: str | os.PathLike[str] | None = None,
) -> None:
    """Have a model take inputs from any device, and give its outputs back there.

    Args:
        model: with its tensors in their places.
        devices: by a module's path, complete and disjoint; the empty path is the model itself.
        execution_device: where its inputs go, and where those modules compute whose weights wait.
        offload_folder: where weights go that are to wait on a disk.

    Raises:
        ArgumentError: there is no such folder, and weights are to wait there.
    """
    if any(device in WAITING for device in devices.values()):
        _dispatch(model, devices, execution_device, offload_folder)
    else:
        _align(model, devices, execution_device)
    note_devices(model, devices)


def note_devices(model: nn.Module, devices: Mapping[str, str]) -> None:
    """Set `hf_device_map`, where the libraries look for where a model's modules are."""
    model.__dict__["hf_device_map"] = dict(devices)


def device_at(devices: Mapping[str, str], path: str, otherwise: str) -> str:
    """Return the device of a module or tensor by its path: that of the nearest module above it.

    Args:
        devices: by path.
        path: of what is asked for.
        otherwise: what a module has that lies above some of them.
    """
    while path not in devices:
        if not path:
            return otherwise
        path = path.rpartition(".")[0]
    return devices[path]


def _align(model: nn.Module, devices: Mapping[str, str], execution_device: str) -> None:
    """Add a hook to every module that has a tensor in it.

    To all of them, because pipelines call more than `forward`: a decoder's inputs come by `decode`.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    class InPlace(AlignDevicesHook):  # type: ignore[misc] # accelerate has no types
        """Leaves the weights where they are."""

        def init_hook(self, module: nn.Module) -> nn.Module:
            return module

    for path, module in _with_tensors(model):
        device = torch.device(device_at(devices, path, execution_device))
        hook = InPlace(device, io_same_device=not path, skip_keys=_skip_keys(model))
        add_hook_to_module(module, hook, append=True)


def _dispatch(
    model: nn.Module,
    devices: Mapping[str, str],
    execution_device: str,
    offload_folder: str | os.PathLike[str] | None,
) -> None:
    from accelerate import dispatch_model

    if DISK in devices.values() and offload_folder is None:
        raise ArgumentError("weights are to wait on a disk; say where by `offload_folder`")
    if execution_device != CPU and CPU in devices.values():
        raise ArgumentError(
            "accelerate cannot compute on the CPU within a model of which other parts wait there; "
            "use 'offload' instead of 'cpu' for its parts"
        )
    with warnings.catch_warnings():
        # It wants a device for each name of a tied module, and wonders at all but the first.
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        dispatch_model(
            model,
            _as_accelerate(model, devices, execution_device),
            main_device=execution_device,
            offload_dir=_own_folder(model, offload_folder) if DISK in devices.values() else None,
            skip_keys=_skip_keys(model),
            force_hooks=True,
        )


def _as_accelerate(
    model: nn.Module, devices: Mapping[str, str], execution_device: str
) -> dict[str, str]:
    """Return a map in the words of accelerate, where weights wait on `cpu`, and by parts."""
    found = dict(devices)
    if found.get("") in WAITING:
        own = dict.fromkeys((*model._parameters, *model._buffers), execution_device)
        found = own | dict.fromkeys((name for name, _ in model.named_children()), found[""])
    return {path: CPU if device == OFFLOAD else device for path, device in found.items()}


def _own_folder(model: nn.Module, parent: str | os.PathLike[str] | None) -> str:
    """Make a folder that goes with a model: in one that has weights accelerate writes none."""
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="shmload-offload-", dir=parent)
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _with_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with a tensor in or below them, with their paths."""
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


def _skip_keys(model: nn.Module) -> Any:
    """Return the arguments that a model wants left where they are; each library has its name."""
    keys = getattr(model, "_skip_keys", None)
    return keys or getattr(model, "_skip_keys_device_placement", None)
