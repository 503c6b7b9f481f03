"""Hooks on a model: they move activations between the devices of one pipeline.

Weights that stay on a device are there before. `waiting` brings those that wait on the host.
The hooks are accelerate's, so the libraries find, heed and remove them as such.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from shmload._devices.origin import SegmentFiles
from shmload._devices.waiting import Waiting
from shmload._placement.inventory import CPU, OFFLOAD
from shmload._placement.modules import join
from shmload.errors import ArgumentError


class WaitingBlocks(NamedTuple):
    """The blocks of a model whose weights wait on the host for an accelerator."""

    waiting: Waiting
    """Brings them to the accelerator."""
    roots: Mapping[nn.Module, nn.Module]
    """As `find_blocks` returns it."""
    segments: SegmentFiles
    """Hold the weights, or some of them."""


def attach_hooks(
    model: nn.Module,
    devices: Mapping[str, str],
    execution_device: str,
    blocks: WaitingBlocks | None = None,
) -> None:
    """Have a model take inputs from any device, and return its outputs on the same device.

    Args:
        model: with its tensors on their devices.
        devices: by a module's path, complete and disjoint; the empty path is the model itself.
        execution_device: where its inputs go, and where modules compute whose weights wait.
        blocks: for weights that wait; None if none wait, or if the CPU computes with them.
    """
    if blocks is None:
        here = {path: CPU if name == OFFLOAD else name for path, name in devices.items()}
        _align(model, here, execution_device)
    else:
        for root in dict.fromkeys(blocks.roots.values()):
            blocks.waiting.add(root, blocks.segments.origins(root.parameters()))
        _align(model, devices, execution_device, blocks.waiting, blocks.roots)
    note_devices(model, devices)


def find_blocks(
    model: nn.Module, devices: Mapping[str, str], paths: Iterable[str]
) -> dict[nn.Module, nn.Module]:
    """Return the modules whose weights wait, each with its block.

    Args:
        model: with weights that wait for an accelerator.
        devices: of its modules.
        paths: of the modules that travel as a block if their weights wait.

    Raises:
        ArgumentError: a weight is more than consecutive bytes.
    """
    # Parameters of other classes than torch's own are more than their bytes.
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        raise ArgumentError(
            f"{type(model).__name__} has weights of a class of their own, such as quantised ones, "
            "which cannot wait for an accelerator; leave the model on one, or use "
            "enable_model_cpu_offload() of its pipeline"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    roots: dict[nn.Module, nn.Module] = {}
    for path in paths:
        root = modules.get(path)
        if root is not None and root not in roots and device_at(devices, path, "") == OFFLOAD:
            for module in root.modules():
                roots.setdefault(module, root)
    return roots


def stay_on_device(
    model: nn.Module, devices: Mapping[str, str], roots: Collection[nn.Module]
) -> Iterator[str]:
    """Yield the paths of tensors of waiting modules that do not travel.

    These are buffers, and what is in no block.

    Args:
        model: with weights that wait.
        devices: of its modules.
        roots: the modules in blocks.
    """
    for path, module in model.named_modules():
        own = module._buffers if module in roots else {**module._buffers, **module._parameters}
        for name in own:
            if device_at(devices, join(path, name), "") == OFFLOAD:
                yield join(path, name)


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
    skip_keys = _skip_keys_of(model)
    for path, module in list(model.named_modules()):
        if path and not _has_tensors(module):
            continue
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


def _has_tensors(module: nn.Module) -> bool:
    """Tell whether a module has a tensor in or below it."""
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


def _skip_keys_of(model: nn.Module) -> Any:
    """Return the names of arguments that are not moved; the libraries have two names for this."""
    keys = getattr(model, "_skip_keys", None)
    return keys or getattr(model, "_skip_keys_device_placement", None)


def add_hook(module: nn.Module, hook: "ActivationsHook") -> None:
    """Add a hook to a module, behind those that it has."""
    add_hook_to_module(module, hook, append=True)


class ActivationsHook(AlignDevicesHook):  # type: ignore[misc] # accelerate has no types
    """Moves a module's inputs to its device; leaves the weights where they are."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved_args, moved_kwargs = super().pre_forward(module, *args, **kwargs)
        # Accelerate copies each list. Some modules tell their callers something by a list: the VAE
        # of Wan counts its layers in one.
        own = {name: _own_unless_moved(kwargs[name], moved) for name, moved in moved_kwargs.items()}
        return tuple(map(_own_unless_moved, args, moved_args)), own


class ModelHook(ActivationsHook):
    """For a model with blocks that wait: adapters that came into no block go to its device.

    An adapter on a module without submodules stands around it, and so outside of its block.
    """

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for holder, name, tensor in _strays(module):
            moved = tensor.detach().to(self.execution_device)
            holder._parameters[name] = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        return super().pre_forward(module, *args, **kwargs)


def _own_unless_moved(given: Any, moved: Any) -> Any:
    return given if _is_same(given, moved) else moved


def _is_same(given: Any, moved: Any) -> bool:
    """Tell whether an argument and its copy by accelerate hold the same objects."""
    if isinstance(given, list | tuple):
        return all(map(_is_same, given, moved))
    if isinstance(given, Mapping):
        return all(_is_same(value, moved[key]) for key, value in given.items())
    return given is moved


def _strays(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield the parameters on the host that are in no block, each with its module and name."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    if any(isinstance(each, WaitingHook) and each.is_for_block(module) for each in hooks):
        return
    for name, tensor in module._parameters.items():
        if tensor is not None and tensor.is_cpu:
            yield module, name, tensor
    for child in module.children():
        yield from _strays(child)


class WaitingHook(ActivationsHook):
    """Has a block's weights on the device while a module of the block computes.

    Args:
        device: where the module computes.
        waiting: brings the weights.
        root: the block: this module, or one above it.
        **others: for `AlignDevicesHook`.
    """

    def __init__(
        self, device: torch.device, waiting: Waiting, root: nn.Module, **others: Any
    ) -> None:
        super().__init__(device, **others)
        self._waiting = waiting
        self._root = root

    def is_for_block(self, module: nn.Module) -> bool:
        """Tell whether a module is the whole block."""
        return module is self._root

    def init_hook(self, module: nn.Module) -> nn.Module:
        # Not in `pre_forward`: what that begins would not end if `forward` raises.
        own = vars(module)  # where accelerate keeps it
        own["_old_forward"] = functools.partial(self._compute, own["_old_forward"])
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self._waiting.release()
        own = vars(module)
        own["_old_forward"] = own["_old_forward"].args[0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.cpu()
        return module

    def _compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._waiting.using(self._root):
            return forward(*args, **kwargs)
