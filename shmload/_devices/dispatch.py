"""Weights that wait under accelerate's own hooks: on a disk, or of a class of their own."""

import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from shmload._placement.inventory import CPU, DISK, OFFLOAD
from shmload._placement.table import WAITING
from shmload.errors import ArgumentError


def dispatch(
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
            skip_keys=skip_keys_of(model),
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


def skip_keys_of(model: nn.Module) -> Any:
    """Return the names of arguments that are not moved; the libraries have two names for this."""
    keys = getattr(model, "_skip_keys", None)
    return keys or getattr(model, "_skip_keys_device_placement", None)
