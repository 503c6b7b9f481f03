"""Weights that come back to the host: an unchanged one lies in its segment again.

The libraries' offloading moves weights to a device and back, module by module, with
`torch.nn.Module.to`. A move back copies them into memory of the process alone, so each process
would have a copy after its first run. Before a module that was loaded over segments moves back, its
weights whose bytes on the device are those of their segment are mapped from there. Torch then finds
them on the host, and copies the others.

    on the host, in the segment ──to(device)──▶ on the device
               ▲                                      │ to("cpu")
               ├── mapped anew ◀── yes ── has it the segment's bytes?
    on the host, private ◀── copied ◀── no ───────────┘
"""

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shmload._building.homes import Away, Homes
from shmload._building.mapped import modules_of
from shmload._compat import as_plain_tensors, wrap_moves
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)

Fn = Callable[[torch.Tensor], torch.Tensor]
_watched: "weakref.WeakKeyDictionary[torch.nn.Module, Homes]" = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    """Whether a thread moves a module now: torch moves the modules in it one by one."""

    is_moving = False


_thread = _Thread()


def watch(model: torch.nn.Module, homes: Homes) -> None:
    """Have a model's weights come home when it, or a module of it, moves to the host.

    A copy of it moves as ever.
    """
    _watch_moves()
    for module in modules_of(model):
        _watched.setdefault(module, homes)  # else it came from an earlier load


def adopt(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Have the weights of a module come home to where those of another lie.

    Args:
        module: it has the other's weights now, on the host or on a device.
        other: is of what a load has returned; on the host.
    """
    homes = _watched.get(other)
    if homes is None:
        _watched.pop(module, None)
    else:
        _watched[module] = homes
        homes.adopt(module, other)


@functools.cache
def _watch_moves() -> None:
    """Have each module that moves looked up.

    An attribute of the module would be the first thing that its copies and pickles share. Two
    threads may do it twice: the inner one finds that the module moves already.
    """
    wrap_moves(_move)


def _move(of_torch: Callable[..., Any], module: torch.nn.Module, fn: Fn, recurse: bool) -> Any:
    """Apply a function to the tensors of a module, as torch does; first bring weights home."""
    if module not in _watched or _thread.is_moving:
        return of_torch(module, fn, recurse)
    _thread.is_moving = True
    try:
        _bring_home(modules_of(module) if recurse else [module], fn)
        return of_torch(module, fn, recurse)
    finally:
        _thread.is_moving = False


def _bring_home(modules: Iterable[torch.nn.Module], fn: Fn) -> None:
    """Map the weights that a function would copy to the host, and that are unchanged.

    Args:
        modules: of weights on the host it is noted where they lie.
        fn: the function.
    """
    away: defaultdict[Homes, list[Away]] = defaultdict(list)
    # The libraries' quantised parameters would make such parameters of all that is computed.
    with as_plain_tensors():
        for module in modules:
            if homes := _watched.get(module):
                away[homes] += homes.look(module)
    # Only torch's own functions are known to do nothing but move.
    if getattr(fn, "__module__", "") != torch.nn.Module.__module__:
        return

    @functools.cache
    def is_copied_to_host(device: torch.device, dtype: torch.dtype) -> bool:
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        return moved.is_cpu and moved.dtype == dtype

    try:
        for homes, weights in away.items():
            coming = [
                each for each in weights if is_copied_to_host(each.tensor.device, each.home.dtype)
            ]
            with as_plain_tensors():
                homes.bring(coming)
    # A device that is full, or cannot compute with integers; too many open files.
    except (OSError, RuntimeError, ShmloadError) as exc:
        logger.debug("weights are copied to the host: %s", exc)
