"""Compares two objects of one process and all that they hold, and names the differences.

It shares no code with shmload, whose results it judges. What it cannot look into is a difference,
never equal. Not compared: addresses, who owns memory, and torch's counts of changes.
"""

import collections
import copyreg
import functools
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Any

import numpy as np
import tokenizers
import torch

Parts = list[tuple[Any, Any]]
"""What an object holds: each part by its key, the name of an attribute or its number."""

_PLAIN = (
    *(str, bytes, bytearray, int, float, complex, bool, range, slice),
    *(type(None), type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype),
    *(PurePath, re.Pattern),
)
_ONE_OBJECT = (type, types.ModuleType, types.CodeType)
_ON_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# Locks are free or held, and have no other state.
_WITHOUT_STATE = (type(threading.Lock()), type(threading.RLock()))


def differences(
    one: Any,
    other: Any,
    name: str = "it",
    *,
    left_out: Collection[str] = (),
    unordered: Collection[str] = (),
    numbered: Collection[str] = (),
    at_most: int = 3,
) -> list[str]:
    """Return the first differences between two objects; what holds them comes before its parts.

    Args:
        one: looked at by its type, its attributes, items, tensors and functions.
        other: in the same process, so that classes, functions and modules can be the same objects.
        name: how the two are called in the sentences.
        left_out: names of attributes and keys of which only the presence is compared.
        unordered: names of attributes that hold lists of texts whose order means nothing.
        numbered: names of attributes that hold dicts of which the keys are numbers of one object's
            own: they may be others, but the same key must be the same wherever it stands.
        at_most: the number of sentences.
    """
    comparison = _Comparison(
        frozenset(left_out), frozenset(unordered), frozenset(numbered), at_most
    )
    comparison.run(one, other, name)
    return comparison.found


class _Comparison:
    def __init__(
        self,
        left_out: frozenset[str],
        unordered: frozenset[str],
        numbered: frozenset[str],
        at_most: int,
    ) -> None:
        self.found: list[str] = []
        self._left_out = left_out
        self._unordered = unordered
        self._numbered = numbered
        self._at_most = at_most
        self._numbers: dict[int, int] = {}
        # By id. The objects are kept, so no later one gets the id.
        self._partners: dict[int, tuple[Any, Any]] = {}
        self._met: dict[int, Any] = {}
        self._waiting: collections.deque[tuple[Any, Any, str]] = collections.deque()
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, str]] = []

    def run(self, one: Any, other: Any, name: str) -> None:
        self._waiting.append((one, other, name))
        while self._waiting and len(self.found) < self._at_most:
            self._compare(*self._waiting.popleft())
        if not self.found:
            self._compare_memory()

    def _compare(self, one: Any, other: Any, where: str) -> None:
        if type(one) is not type(other):
            self._note(where, f"a {_name_of(type(one))}", f"a {_name_of(type(other))}")
        elif isinstance(one, _ONE_OBJECT) or type(one) is object:
            if one is not other:
                self._note(where, f"{one!r:.60}", f"another {other!r:.60}")
        elif isinstance(one, _PLAIN):
            if not _is_equal(one, other):
                self._note(where, f"{one!r:.60}", f"{other!r:.60}")
            self._wait(
                _held_by_dict(one), _held_by_dict(other), where
            )  # paths have caches in slots
        elif id(one) in self._partners or id(other) in self._met:
            if self._partners.get(id(one), (None, None))[1] is not other:
                self.found.append(f"{where} is one object with another part, on one side only")
        elif one is not other:
            self._partners[id(one)] = one, other
            self._met[id(other)] = other
            self._compare_content(one, other, where)

    def _compare_content(self, one: Any, other: Any, where: str) -> None:
        if isinstance(one, torch.Tensor):
            self._compare_tensors(one, other, where)
        elif isinstance(one, set | frozenset):
            if one != other:
                self._note(where, f"{one!r:.60}", f"{other!r:.60}")
        else:
            read = _reader_of(one)
            if read is None:
                self.found.append(f"{where} is a {_name_of(type(one))}, which cannot be compared")
                return
            self._wait(read(one), read(other), where)
        self._wait(_attributes_of(one), _attributes_of(other), where)

    def _wait(self, one: Parts, other: Parts, where: str) -> None:
        """Compare the names of the parts, and have the parts compared later."""
        names, others = ([_key(key) for key, _ in parts] for parts in (one, other))
        if where.rpartition(".")[2] in self._numbered and len(names) == len(others):
            others = [self._number_like(*each) for each in zip(names, others, strict=True)]
        if names != others:
            odd = [each for each in names if each not in others]
            odd += [each for each in others if each not in names]
            order = [f"the order {each}"[:60] for each in (names, others)]
            if odd:
                self.found.append(f"{where} has other entries: {', '.join(map(str, odd[:3]))}")
            else:
                self._note(where, *order)
            return
        for name, (key, mine), (like, theirs) in zip(names, one, other, strict=True):
            if name in self._left_out:
                continue
            if name in self._unordered and isinstance(mine, list) and isinstance(theirs, list):
                mine, theirs = sorted(mine), sorted(theirs)
            if not isinstance(key, _PLAIN):
                self._waiting.append((key, like, f"{where}: a key"))
            self._waiting.append((mine, theirs, f"{where}.{name}"))

    def _number_like(self, one: Any, other: Any) -> Any:
        """Return the first of two numbers if it has always stood where the other one did."""
        if type(one) is type(other) is int and other not in self._numbers.values():
            self._numbers.setdefault(one, other)
        return one if self._numbers.get(one) == other else other

    def _note(self, where: str, one: str, other: str) -> None:
        self.found.append(f"{where} is {one}, not {other}")

    # Tensors --------------------------------------------------------------------------------------

    def _compare_tensors(self, one: torch.Tensor, other: torch.Tensor, where: str) -> None:
        for fact, read in _FACTS.items():
            if read(one) != read(other):
                self.found.append(f"{where} has {fact} {read(one)}, not {read(other)}")
                return
        if (flatten := getattr(one, "__tensor_flatten__", None)) is not None:
            names, context = flatten()
            mine, theirs = ([getattr(each, name) for name in names] for each in (one, other))
            self._waiting.append((mine, theirs, where))
            self._waiting.append((context, other.__tensor_flatten__()[1], where))
            return
        self._waiting.append(
            (
                one.grad if one.is_leaf else None,
                other.grad if other.is_leaf else None,
                f"{where}.grad",
            )
        )
        if one.is_meta:
            return
        if _bytes_of(one) != _bytes_of(other):
            self.found.append(f"{where} has other elements")
        self._tensors.append((one, other, where))

    def _compare_memory(self) -> None:
        """Require that tensors overlap on one side as they do on the other."""
        mine, theirs = (_groups([pair[side] for pair in self._tensors]) for side in (0, 1))
        for (_, _, where), group, like in zip(self._tensors, mine, theirs, strict=True):
            if group != like and len(self.found) < self._at_most:
                self.found.append(f"{where} shares its memory with other tensors")


_FACTS: dict[str, Callable[[torch.Tensor], object]] = {
    "dtype": lambda tensor: tensor.dtype,
    "shape": lambda tensor: tensor.shape,
    "strides": lambda tensor: tensor.stride() if tensor.layout == torch.strided else None,
    "layout": lambda tensor: tensor.layout,
    "device": lambda tensor: tensor.device,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_leaf": lambda tensor: tensor.is_leaf,
    "is_inference": lambda tensor: tensor.is_inference(),
    "is_conj": lambda tensor: tensor.is_conj(),
    "is_neg": lambda tensor: tensor.is_neg(),
    "grad_fn": lambda tensor: type(tensor.grad_fn),
}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # Bytes, because NaN != NaN and -0.0 == 0.0.
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _groups(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return of each tensor the first tensor of those that its memory overlaps, and the distance.

    A chain of overlaps is one group. The distance is from the group's first byte.
    """
    spans = sorted(
        (tensor.data_ptr(), _extent_of(tensor), number)
        for number, tensor in enumerate(tensors)
        if tensor.numel()
    )
    found = [(number, 0) for number in range(len(tensors))]
    group: list[tuple[int, int]] = []
    begin = end = 0

    def close() -> None:
        first = min((number for _, number in group), default=0)
        for address, number in group:
            found[number] = first, address - begin

    for address, nbytes, number in spans:
        if address >= end:
            close()
            group, begin, end = [], address, address
        group.append((address, number))
        end = max(end, address + nbytes)
    close()
    return found


def _extent_of(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


# Other objects ------------------------------------------------------------------------------------


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # tells -0.0 from 0.0; NaN is equal
    return bool(one == other)


def _key(key: Any) -> Any:
    return key if isinstance(key, _PLAIN) else f"<{_name_of(type(key))}>"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _attributes_of(value: Any) -> Parts:
    """Return the attributes of an object, of its dict and its slots."""
    found = _held_by_dict(value)
    missing = object()
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and base.__flags__ & _ON_HEAP:
                part = _slot(slot, value, missing)
                if part is not missing:
                    found.append((name, part))
    return found


def _held_by_dict(value: Any) -> Parts:
    try:
        held = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return []
    return list(held.items()) if isinstance(held, dict) else []


def _slot(slot: types.MemberDescriptorType, value: Any, missing: object) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # without a value
        return missing


def _numbered(value: Any) -> Parts:
    return list(enumerate(value))


def _of_function(value: types.FunctionType) -> Parts:
    closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    globals_of = id(value.__globals__)  # of one module, whatever that holds
    return [
        *_named(value, "__module__", "__name__", "__qualname__", "__doc__", "__annotations__"),
        *_named(value, "__code__", "__defaults__", "__kwdefaults__"),
        ("__globals__", globals_of),
        *closure,
    ]


def _named(value: Any, *names: str) -> Parts:
    return [(name, getattr(value, name)) for name in names]


def _of_cell(value: types.CellType) -> Parts:
    try:
        return [("content", value.cell_contents)]
    except ValueError:  # empty
        return []


def _of_array(value: Any) -> Parts:
    """Return the facts of a NumPy array or scalar, and its elements."""
    flags = value.flags.writeable, value.flags.aligned  # not whether it owns its memory
    facts = [*_named(value, "dtype", "shape", "strides"), ("flags", flags)]
    is_of_objects = value.dtype.hasobject
    return [*facts, ("elements", value.tolist() if is_of_objects else value.tobytes())]


def _of_tokenizer(value: tokenizers.Tokenizer) -> Parts:
    return [("json", value.to_str()), ("special", value.encode_special_tokens)]


def _of_pickle(value: Any) -> Parts:
    """Return what an object gives to a pickle; for those whose content Python does not see."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return [("name", reduced)]
    return _numbered([*reduced[:3], *(list(each or ()) for each in reduced[3:5])])


def _of_dict(value: dict[Any, Any]) -> Parts:
    # Not as it iterates: transformers' ACT2FN makes its values then.
    found = list(zip(dict.keys(value), dict.values(value), strict=True))
    if isinstance(value, collections.defaultdict):
        found.append(("<default_factory>", value.default_factory))
    return found


def _reader_of(value: Any) -> Callable[[Any], Parts] | None:
    """Return what reads the parts of an object besides its attributes; None if nothing does."""
    for kinds, read in _READERS:
        if isinstance(value, kinds):
            return read
    package = type(value).__module__.partition(".")[0]
    if package in _READERS_BY_PACKAGE:
        return _READERS_BY_PACKAGE[package]
    if package == "tokenizers" or _is_opaque(value):
        return _of_pickle if _has_state(value) else None
    return lambda _: []


_READERS: tuple[tuple[Any, Callable[[Any], Parts]], ...] = (
    (_WITHOUT_STATE, lambda _: []),
    (dict, _of_dict),
    (types.MappingProxyType, lambda value: list(value.items())),
    (collections.deque, lambda value: [*_numbered(value), *_named(value, "maxlen")]),
    ((list, tuple), _numbered),
    (types.FunctionType, _of_function),
    (types.BuiltinFunctionType, lambda value: _named(value, "__qualname__", "__self__")),
    (types.MethodType, lambda value: _named(value, "__func__", "__self__")),
    ((classmethod, staticmethod), lambda value: _named(value, "__func__")),
    (property, lambda value: _named(value, "fget", "fset", "fdel")),
    (functools.partial, lambda value: _named(value, "func", "args", "keywords")),
    (functools._lru_cache_wrapper, lambda value: _named(value, "__wrapped__")),
    (types.CellType, _of_cell),
    (weakref.ReferenceType, lambda value: [("referent", value())]),
    (itertools.count, lambda value: [("next", repr(value))]),
    ((np.ndarray, np.generic), _of_array),
    (torch.Generator, lambda value: [("state", value.get_state()), *_named(value, "device")]),
    (tokenizers.Tokenizer, _of_tokenizer),
)


# Of packages that need not be here.
_READERS_BY_PACKAGE: dict[str, Callable[[Any], Parts]] = {
    # Its compiled code has sets in the order of their hashes, which are of a process.
    "_regex": lambda value: _named(value, "pattern", "flags", "named_lists"),
    "sentencepiece": lambda value: [("model", value.serialized_model_proto())],
}


def _is_opaque(value: Any) -> bool:
    """Tell whether an object may have a state that no attribute shows.

    It may if one of its classes is not Python's. Those of Python are on the heap, and the first of
    them adds a dict or slots.
    """
    bases = type(value).__mro__[:-1]
    is_of_python = any({"__dict__", "__slots__"} & vars(base).keys() for base in bases)
    return not is_of_python or not all(base.__flags__ & _ON_HEAP for base in bases)


def _has_state(value: Any) -> bool:
    try:
        _of_pickle(value)
    except Exception:  # whatever a class raises that cannot be pickled
        return False
    return True
