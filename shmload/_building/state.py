"""The state of the process that a build depends on: one list, for whatever was built before.

A pipeline that was loaded ahead is what the libraries built in one state. A load in another state
builds anew. The list has the modes and settings of torch, the constants of classes,
and the tables in which programs register what the libraries then use. Code is compared elsewhere.
"""

import logging
import operator
import sys
import types
import uuid
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple, Self

import torch

from shmload._compat import (
    REGISTRIES,
    global_hooks,
    lazy_names,
    reader,
)

# Python's own, and so of programs that set none; a lower one may end a build.
_RECURSION_LIMIT = 1000
_PLAIN = (str, bool, int, float)
# `copy` and `pickle` keep the names of slots in a class when they first meet it.
_NEVER = ("__doc__", "__slotnames__")
LIBRARIES = frozenset({"diffusers", "transformers"})

MODES: dict[str, Callable[[], object]] = {
    "the default dtype": lambda: str(torch.get_default_dtype()),
    "the default device": lambda: str(torch.get_default_device()),
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the precision of products": torch.get_float32_matmul_precision,
    "TF32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "modes of functions": reader("_len_torch_function_stack"),
    "modes of operations": reader("_len_torch_dispatch_stack"),
    "flash attention": reader("_get_flash_sdp_enabled"),
    "plain attention": reader("_get_math_sdp_enabled"),
    "attention in little memory": reader("_get_mem_efficient_sdp_enabled"),
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "hooks for all modules": lambda: list(map(len, global_hooks())) or uuid.uuid4(),
    "overwritten parameters": torch.__future__.get_overwrite_module_params_on_conversion,
    "swapped parameters": torch.__future__.get_swap_module_params_on_conversion,
    "the recursion limit": lambda: min(sys.getrecursionlimit(), _RECURSION_LIMIT),
}
"""What a program may set, by name."""


def modes() -> dict[str, str]:
    """Return each mode and setting, as text that is the same in every process."""
    return {name: repr(read()) for name, read in MODES.items()}


def why_other(before: dict[str, str]) -> str | None:
    """Return why this process may not use what was built in another state; None if it may.

    Args:
        before: the modes in which it was built.
    """
    if _hears_details():
        return "the libraries are asked to log more than warnings"
    now = modes()
    if (name := next((name for name in now if now[name] != before.get(name)), None)) is not None:
        return f"{name}: it is another"
    name = replaced_name()
    return f"{name} was replaced" if name else None


def _hears_details() -> bool:
    """Tell whether this process hears what the model libraries say below a warning."""
    if any(logging.getLogger(name).isEnabledFor(logging.INFO) for name in LIBRARIES):
        return True
    beginnings = tuple(f"{name}." for name in LIBRARIES)
    return any(
        name.startswith(beginnings) and 0 < getattr(each, "level", 0) <= logging.INFO
        for name, each in list(logging.root.manager.loggerDict.items())
    )


def constants(kind: type) -> dict[str, object]:
    """Return the constants of a class: plain values, and lists and tuples of such."""
    return {
        name: tuple(value) if isinstance(value, (list, tuple)) else value
        for name, value in vars(kind).items()
        if name not in _NEVER
        and "_cache" not in name
        and all(
            isinstance(each, _PLAIN)
            for each in (value if isinstance(value, (list, tuple)) else (value,))
        )
    }


def _dicts_of(value: Any) -> list[dict[Any, Any]]:
    """Return the dicts in which a table has its entries; none for what is no table."""
    own = [value] if isinstance(value, dict) else []
    if type(value).__module__.partition(".")[0] not in LIBRARIES:
        return own
    # Not getattr: some load what they are asked for.
    both = {**vars(type(value)), **getattr(value, "__dict__", {})}
    return own + [both[name] for name in REGISTRIES if isinstance(both.get(name), dict)]


def modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Yield name and module of all that is imported."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            yield name, module


class _Held(NamedTuple):
    """What a dict holds, to compare by identity."""

    keys: list[Any]
    values: list[Any]

    @classmethod
    def of(cls, value: dict[Any, Any]) -> Self:
        """Read a dict; not as it iterates: transformers' `ACT2FN` makes its values then."""
        return cls(list(dict.keys(value)), list(dict.values(value)))

    def is_same(self, other: Self) -> bool:
        """Tell whether another has the very same keys and values, in this order."""
        return all(
            len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))
            for mine, theirs in zip(self, other, strict=True)
        )


class Tables:
    """What the libraries' tables have at one moment: those with names in capitals."""

    def __init__(self) -> None:
        self._known = [
            (home, name, value, [(held, _Held.of(held)) for held in (*dicts, *_inner(dicts))])
            for home, module in modules()
            if home.partition(".")[0] in LIBRARIES
            for name, value in list(vars(module).items())
            if name.isupper() and "CACHE" not in name and (dicts := _dicts_of(value))
        ]

    def changed(self, hidden: Container[str]) -> str | None:
        """Return the name of a table that has other entries now; None if all have the same.

        Args:
            hidden: names of modules that are not compared.
        """
        for home, name, value, contents in self._known:
            if home in hidden:
                continue
            module = sys.modules.get(home)
            # One that imports its names at their first use may not have this one yet.
            absent = value if hasattr(type(module), "__getattr__") else None
            is_here = module is None or vars(module).get(name, absent) is value
            if not is_here or not all(_Held.of(held).is_same(before) for held, before in contents):
                return f"{home}.{name}"
        return None


def replaced_name() -> str | None:
    """Return a name of a lazy package that leads elsewhere than to its module; None if none does.

    A program that puts a class of its own there has the libraries build that.
    """
    for home, package in modules():
        if home.partition(".")[0] not in LIBRARIES:
            continue
        fetched = vars(package)
        homes = lazy_names(package)
        if homes is None:
            if home in LIBRARIES:  # nothing is known of its names
                return home
            continue
        for name in homes.keys() & fetched.keys():
            origin = sys.modules.get(f"{home}.{homes[name]}")
            value = fetched[name]
            if isinstance(value, types.ModuleType) or origin is None:
                continue
            if getattr(origin, name, value) is not value:
                return f"{home}.{name}"
    return None


def _inner(dicts: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    return [each for held in dicts for each in dict.values(held) if isinstance(each, dict)]
