"""Hooks on modules: inputs go to where a module computes, and its weights if they wait elsewhere.

They are accelerate's hooks, so the libraries find, heed and remove them as such.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from shmload._devices.waiting import Waiting


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
