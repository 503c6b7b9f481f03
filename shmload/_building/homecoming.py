"""Weights that come back to the host: an unchanged one lies in its segment again.

The libraries' offloading moves weights to a device and back, module by module. A move back copies
them into memory of the process alone, so each process would have a copy after its first run. A
module that was loaded over segments moves otherwise: a weight whose bytes on the device are those
of its segment is mapped from the segment anew, and nothing is copied from the device.

    on the host, in the segment ──to(device)──▶ on the device
               ▲                                      │ to("cpu")
               ├── mapped anew ◀── yes ── has it the segment's bytes?
    on the host, private ◀── copied ◀── no ───────────┘
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.__future__ import get_swap_module_params_on_conversion
from torch.utils._python_dispatch import TorchDispatchMode

from shmload._building.homes import Found, Home, Homes
from shmload._building.mapped import modules_of, plain_tensors
from shmload._compat import as_plain_tensors, wrap_moves, wrap_pins
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)

Fn = Callable[[torch.Tensor], torch.Tensor]
_watched: "weakref.WeakKeyDictionary[torch.nn.Module, Homes]" = weakref.WeakKeyDictionary()
_pinned: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


class _Thread(threading.local):
    """The homes to which a thread's moves bring weights."""

    def __init__(self) -> None:
        self.homes: set[Homes] = set()


_thread = _Thread()


def watch(model: torch.nn.Module, homes: Homes) -> None:
    """Have a model's weights come home when it, or a module of it, moves to the host.

    A copy of it moves as ever.
    """
    _watch_moves()
    _watch_pins()
    for module in modules_of(model):
        _watched.setdefault(module, homes)  # else it came from an earlier load


def homes_of(model: torch.nn.Module) -> Homes | None:
    """Return where the weights of a watched model lie; None if it is not watched."""
    return _watched.get(model)


def adopt(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Have the weights of a module come home to where those of another lie.

    Args:
        module: it has the other's weights now, on the host or on a device.
        other: is of what a load has returned.
    """
    homes = homes_of(other)
    if homes is None:
        _watched.pop(module, None)
        return
    _watched[module] = homes
    pairs = (tensors_of(each, recurse=False) for each in (module, other))
    for tensor, its in zip(*pairs, strict=True):
        if not tensor.is_cpu and (home := homes.find(its)):
            homes.note(tensor, home)


def has_pinned_copies(model: torch.nn.Module) -> bool:
    """Tell whether diffusers brings weights of a watched model from pinned copies of its own."""
    return bool(_pinned) and any(module in _pinned for module in modules_of(model))


@functools.cache
def _watch_moves() -> None:
    """Have each module that moves looked up.

    An attribute of the module would be the first thing that its copies and pickles share. Two
    threads may do it twice: a move that is watched is not watched again.
    """
    wrap_moves(_context_of)


def _watch_pins() -> None:
    """Have what diffusers pins be told, as soon as diffusers is imported."""
    if "diffusers" in sys.modules:
        _wrap_pins()


@functools.cache
def _wrap_pins() -> None:
    wrap_pins(_say_what_is_pinned)


def _context_of(
    module: torch.nn.Module, fn: Fn, recurse: bool
) -> contextlib.AbstractContextManager[None] | None:
    homes = _watched.get(module)
    return _moving(homes, module, fn, recurse=recurse) if homes else None


@contextlib.contextmanager
def _moving(homes: Homes, module: torch.nn.Module, fn: Fn, *, recurse: bool) -> Iterator[None]:
    """Return a context in which a module moves, and copies nothing that can come home.

    Args:
        homes: of the module's weights.
        module: was watched.
        fn: what is applied to its tensors.
        recurse: whether the modules in it move too.
    """
    if homes in _thread.homes:
        yield
        return
    if get_swap_module_params_on_conversion():
        # It refuses tensors with weak references, which notes have.
        for tensor in tensors_of(module, recurse=recurse):
            homes.forget(tensor)
        yield
        return
    _thread.homes.add(homes)
    try:
        with _Moves(homes, module, fn, recurse=recurse):
            yield
    finally:
        _thread.homes.remove(homes)


def _say_what_is_pinned(modules: Iterable[torch.nn.Module]) -> None:
    """Warn once that a call keeps a copy of weights that lie in a segment."""
    watched = [module for module in modules if module in _watched]
    _pinned.update(watched)
    if watched:
        _warn_of_pins()


@functools.cache
def _warn_of_pins() -> None:
    logger.warning(
        "group offloading with use_stream=True copies the shared weights into pinned memory of"
        " this process: low_cpu_mem_usage=True with 'leaf_level' keeps no copy, nor does a load"
        " with a device_map that offloads"
    )


_COPY = "aten::_to_copy"
# Their result is the same weight. A parameter is made of what `detach` returns.
_SAME_VALUES = _COPY, "aten::detach", "aten::alias"


class _Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which copies of a module's weights to the host map them instead."""

    def __init__(self, homes: Homes, module: torch.nn.Module, fn: Fn, *, recurse: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._homes = homes
        self._module = module
        self._recurse = recurse
        # torch's own functions move each weight once, and change none before. Of others, each
        # weight is compared when it is copied.
        self._moves_all = getattr(fn, "__module__", "") == torch.nn.Module.__module__
        self._compared: set[int] = set()
        self._found: Found = {}
        # The libraries also move a weight to a device by its `data`, unseen.
        with as_plain_tensors():
            for tensor in tensors_of(module, recurse=recurse):
                if tensor.is_cpu and (home := homes.find(tensor)):
                    homes.note(tensor, home)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if types:  # a tensor that is made of others: its class moves those, which come here too
            return NotImplemented
        if func.name() not in _SAME_VALUES:
            return func(*args, **given)
        (tensor,) = args
        home = self._homes.find(tensor)
        if (
            home
            and not tensor.is_cpu
            and func.name() == _COPY
            and _is_plain_move_to_host(tensor, given)
        ):
            if id(tensor) not in self._compared:
                self._found |= self._take_home(tensor, home)
            _, on_host = self._found.pop(id(tensor), (tensor, None))
            if on_host is not None:
                return on_host
        moved = func(*args, **given)
        if home:
            self._homes.note(moved, home)
        return moved

    def _take_home(self, tensor: torch.Tensor, home: Home) -> Found:
        """Return what a weight is on the host, and what those are that will be copied after it."""
        # The libraries' quantised parameters would make such parameters of all that is computed.
        with as_plain_tensors():
            weights = {id(tensor): (tensor, home)}
            if self._moves_all and not self._compared:
                weights |= {
                    id(each): (each, its)
                    for each in tensors_of(self._module, recurse=self._recurse)
                    if not each.is_cpu and (its := self._homes.find(each))
                }
                self._compared.update(weights)
            try:
                return self._homes.take_home(weights.values())
            # A device that is full, or cannot compute with integers; too many open files.
            except (OSError, RuntimeError, ShmloadError) as exc:
                logger.debug("weights are copied to the host: %s", exc)
                return {}


def tensors_of(module: torch.nn.Module, *, recurse: bool) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a module, and of those in it."""
    for each in modules_of(module) if recurse else (module,):
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None:
                yield from plain_tensors(tensor)


def _is_plain_move_to_host(tensor: torch.Tensor, given: Mapping[str, Any]) -> bool:
    formats = None, torch.preserve_format, torch.contiguous_format
    return (
        torch.device(given.get("device") or tensor.device).type == "cpu"
        and given.get("dtype") in (None, tensor.dtype)
        and given.get("layout") in (None, torch.strided)
        and given.get("memory_format") in formats
        and not given.get("pin_memory")
    )
