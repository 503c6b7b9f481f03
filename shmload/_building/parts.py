"""The parts of an object, by their names: what it holds, whatever its kind.

What depends on an object's class alone is found out once for the class: a snapshot asks of some
150,000 objects.
"""

import collections
import contextlib
import functools
import itertools
import logging
import operator
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

PLAIN = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis), torch.dtype)
# What holds nothing that a program could register in, or changes by itself.
CLOSED = (
    types.CodeType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.FrameType,
    types.ModuleType,
    types.TracebackType,
    functools._lru_cache_wrapper,
    re.Pattern,
    np.ndarray,
    np.generic,
    weakref.ReferenceType,
    threading.Thread,
)
LEAVES = frozenset({*PLAIN, *CLOSED})


def modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Yield name and module of all that is imported."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            yield name, module


class Held(NamedTuple):
    """What an object holds, to compare by identity."""

    names: list[Any]
    """Of a dict its keys, of a class or an object the attributes; none of a sequence or set."""
    values: list[Any]

    def is_same(self, other: "Held") -> bool:
        """Tell whether another has the very same names and values, in this order."""
        return all(
            len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))
            for mine, theirs in zip(self, other, strict=True)
        )


class Kind(NamedTuple):
    """How the objects of one class are read."""

    kind: type
    is_open: bool
    """Whether what they hold is looked at."""
    is_class: bool
    read: Callable[[Any], Held]


# By id of the class, which may have a hash of its own. A judge's audit hook hears each call of id,
# which takes as long as all the rest: so a kind is kept with its objects.
_kinds: dict[int, Kind] = {}


def kind_of(value: object) -> Kind:
    # Not isinstance: some objects make what they stand for, or warn, when asked for their class.
    kind = type(value)
    found = _kinds.get(id(kind))
    if found is None:
        is_class = issubclass(kind, type)
        is_own = not is_class and str(kind.__module__).startswith(("shmload", "_thread"))
        is_open = not (is_own or issubclass(kind, (*PLAIN, *CLOSED)))
        found = _kinds[id(kind)] = Kind(kind, is_open, is_class, _reader(kind))
    return found


def children(value: Any) -> list[tuple[Any, Any]]:
    """Return name and value of each part of an object; in a sequence the names are numbers."""
    kind = kind_of(value)
    if not kind.is_open:
        return []
    held = kind.read(value)
    return list(zip(held.names or range(len(held.values)), held.values, strict=True))


def _reader(kind: type) -> Callable[[Any], Held]:
    for bases, read in _READERS:
        if issubclass(kind, bases):
            return read
    for bases, names in _ATTRIBUTES:
        if issubclass(kind, bases):
            return lambda value: Held(names, [getattr(value, name) for name in names])
    slots = {
        name: slot
        for base in reversed(type.__dict__["__mro__"].__get__(kind))
        for name, slot in base.__dict__.items()
        if isinstance(slot, types.MemberDescriptorType)
    }
    return functools.partial(_of_object, slots)


def _of_object(slots: dict[str, Any], value: Any) -> Held:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError, RuntimeError):
        attributes = None
    is_open = isinstance(attributes, dict)
    names, values = of_dict(attributes) if is_open else Held([], [])
    for name, slot in slots.items():
        with contextlib.suppress(AttributeError):  # one without a value
            values.append(slot.__get__(value))
            names.append(name)
    return Held(names, values)


def of_dict(value: dict[Any, Any]) -> Held:
    """Return what a dict has; not as it iterates: transformers' `ACT2FN` makes its values then."""
    return Held(list(dict.keys(value)), list(dict.values(value)))


def _of_class(value: type) -> Held:
    held = type.__dict__["__dict__"].__get__(value)
    return Held([*held.keys()], [*held.values()])


def _of_function(value: types.FunctionType) -> Held:
    names = [*_OF_FUNCTIONS, *value.__dict__]
    values = [value.__code__, value.__defaults__, value.__kwdefaults__, *value.__dict__.values()]
    if value.__closure__:
        names += (sys.intern(f"<{name}>") for name in value.__code__.co_freevars)
        values += map(_cell, value.__closure__)
    return Held(names, values)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _of_tensor(value: torch.Tensor) -> Held:
    return Held(["_version"], [None if value.is_inference() else value._version])


def _of_logger(value: logging.Logger) -> Held:
    held = {name: each for name, each in vars(value).items() if name != "_cache"}
    return of_dict(held)


_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_READERS: tuple[tuple[Any, Callable[[Any], Held]], ...] = (
    (dict, of_dict),
    ((list, tuple, collections.deque), lambda value: Held([], list(value))),
    ((set, frozenset), lambda value: Held([], sorted(value, key=id))),
    (type, _of_class),
    (types.FunctionType, _of_function),
    (torch.Tensor, _of_tensor),
    (logging.Logger, _of_logger),
    (itertools.count, lambda value: Held(["next"], [sys.intern(repr(value))])),
)
_ATTRIBUTES: tuple[tuple[Any, list[str]], ...] = (
    ((classmethod, staticmethod), ["__func__"]),
    (types.MethodType, ["__func__", "__self__"]),
    (property, ["fget", "fset", "fdel"]),
    (types.MappingProxyType, []),
    (functools.partial, ["func", "args", "keywords"]),
)
