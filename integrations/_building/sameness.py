"""Compares two pipelines, object by object: what a program can see of them must be equal."""

import functools
import types
from typing import Any

import numpy as np
import torch

from shmload.integrations._building.mapped import Spans

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_SHARED = (type, types.ModuleType, types.CodeType)
# A transformers' config of generation notes its own hash, which depends on addresses.
_HASHES = frozenset({"_original_object_hash"})


class Different(Exception):
    """Raised when two pipelines differ; its text says where."""


class Comparison:
    """Compares graphs of objects; also which of their objects are one and the same.

    Args:
        spans: the mappings of the files that weights lie in. A tensor in one of them is compared
            by its place, any other by its bytes.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._partners: dict[int, Any] = {}
        self._met: dict[int, Any] = {}
        self._waiting: list[tuple[Any, Any, str]] = []

    def require_same(self, one: Any, other: Any, name: str) -> None:
        """Compare two objects and all that they hold.

        Raises:
            Different: with the first difference.
        """
        self._waiting.append((one, other, name))
        while self._waiting:
            self._compare(*self._waiting.pop())

    def _compare(self, one: Any, other: Any, where: str) -> None:
        if type(one) is not type(other):
            raise Different(f"{where} is a {type(one).__name__} and a {type(other).__name__}")
        if isinstance(one, _PLAIN):
            if one != other and not (one != one and other != other):
                raise Different(f"{where} is {one!r:.100} and {other!r:.100}")
            return
        if isinstance(one, _SHARED) or one is other:
            if one is not other:
                raise Different(f"{where} is another {type(one).__name__}")
            return
        if id(one) in self._partners or id(other) in self._met:
            if self._partners.get(id(one)) is not other:
                raise Different(f"{where} is shared otherwise")
            return
        self._partners[id(one)] = other
        self._met[id(other)] = one  # both are kept alive: their ids stay theirs
        self._compare_content(one, other, where)

    def _compare_content(self, one: Any, other: Any, where: str) -> None:
        match one:
            case torch.Tensor():
                self._compare_tensors(one, other, where)
            case np.ndarray() | np.generic():
                if (one.dtype, one.shape, one.tobytes()) != (
                    other.dtype,
                    other.shape,
                    other.tobytes(),
                ):
                    raise Different(f"{where} has other elements")
            case dict():
                self._compare_items(one, other, where)
            case list() | tuple():
                self._compare_lists(one, other, where)
            case set() | frozenset():
                if one != other:
                    raise Different(f"{where} has other elements")
            case types.FunctionType():
                self._compare_functions(one, other, where)
            case types.MethodType():
                self._wait(one.__func__, other.__func__, f"{where}.__func__")
                self._wait(one.__self__, other.__self__, f"{where}.__self__")
            case types.BuiltinFunctionType():
                self._wait(one.__qualname__, other.__qualname__, f"{where}.__qualname__")
                self._wait(one.__self__, other.__self__, f"{where}.__self__")
            case functools.partial():
                mine, theirs = ((p.func, p.args, p.keywords) for p in (one, other))
                self._wait(mine, theirs, where)
        self._compare_attributes(one, other, where)

    def _compare_attributes(self, one: Any, other: Any, where: str) -> None:
        mine, theirs = getattr(one, "__dict__", None), getattr(other, "__dict__", None)
        if type(mine) is dict and type(theirs) is dict:
            self._compare_items(mine, theirs, where)

    def _compare_items(self, one: dict[Any, Any], other: dict[Any, Any], where: str) -> None:
        if list(map(_name, dict.keys(one))) != list(map(_name, dict.keys(other))):
            odd = {*map(_name, dict.keys(one))} ^ {*map(_name, dict.keys(other))}
            raise Different(f"{where} has other entries: {sorted(map(str, odd))[:3]}")
        for (key, mine), theirs in zip(dict.items(one), dict.values(other), strict=True):
            if key not in _HASHES:
                self._wait(mine, theirs, f"{where}.{_name(key)}")

    def _compare_lists(self, one: Any, other: Any, where: str) -> None:
        if len(one) != len(other):
            raise Different(f"{where} has {len(one)} items and {len(other)}")
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            self._wait(mine, theirs, f"{where}[{number}]")

    def _compare_functions(self, one: Any, other: Any, where: str) -> None:
        if (one.__code__, one.__globals__) != (other.__code__, other.__globals__):
            raise Different(f"{where} is another function")
        for name in ("__defaults__", "__kwdefaults__"):
            self._wait(getattr(one, name), getattr(other, name), f"{where}.{name}")
        cells, others = one.__closure__ or (), other.__closure__ or ()
        mine, theirs = ([c.cell_contents for c in each] for each in (cells, others))
        self._wait(mine, theirs, f"{where}.__closure__")

    def _compare_tensors(self, one: torch.Tensor, other: torch.Tensor, where: str) -> None:
        for name, mine, theirs in zip(_FACTS, _facts(one), _facts(other), strict=True):
            if mine != theirs:
                raise Different(f"{where} has {name} {mine} and {theirs}")
        if one.is_meta or self._place(one) != self._place(other):
            if one.is_meta:
                return
            raise Different(f"{where} lies elsewhere")
        if self._place(one) is None and _bytes(one) != _bytes(other):
            raise Different(f"{where} has other elements")

    def _place(self, tensor: torch.Tensor) -> tuple[object, int] | None:
        mapping = self._spans.find(tensor)
        if mapping is None:
            return None
        return mapping.inode, mapping.offset + tensor.data_ptr() - mapping.start

    def _wait(self, one: Any, other: Any, where: str) -> None:
        self._waiting.append((one, other, where))


_FACTS = (
    "dtype",
    "shape",
    "strides",
    "requires_grad",
    "is_leaf",
    "device",
    "inference",
    "grad",
    "grad_fn",
)


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.device,
        tensor.is_inference(),
        not tensor.is_leaf or tensor.grad is None,  # torch warns of the question otherwise
        type(tensor.grad_fn),
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    # Bytes, because NaN != NaN and -0.0 == 0.0.
    flat = tensor.detach().contiguous().reshape(-1)
    content: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return content


def _name(key: Any) -> Any:
    return key if isinstance(key, _PLAIN) else f"<{type(key).__qualname__}>"
