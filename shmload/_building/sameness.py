"""Compares two pipelines, object by object: what a program can see of them must be equal."""

import types
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from shmload._building.mapped import Spans
from shmload._building.parts import children
from shmload._building.queued import Refused
from shmload._compat import OWN_HASH

_Parts = list[tuple[Any, Any]]

_PLAIN = (
    *(str, bytes, int, float, complex, bool, type(None)),
    *(torch.dtype, torch.device, PurePath),
)
_SHARED = (type, types.ModuleType, types.CodeType)
# A transformers' config of generation notes its own hash, which depends on addresses.
_HASHES = frozenset({OWN_HASH})


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
            Refused: with the first difference.
        """
        self._waiting.append((one, other, name))
        while self._waiting:
            self._compare(*self._waiting.pop())

    def _compare(self, one: Any, other: Any, where: str) -> None:
        if type(one) is not type(other):
            raise Refused(f"{where} is a {type(one).__name__} and a {type(other).__name__}")
        if isinstance(one, _PLAIN):
            if one != other and not (one != one and other != other):
                raise Refused(f"{where} is {one!r:.100} and {other!r:.100}")
            return
        if isinstance(one, _SHARED) or one is other:
            if one is not other:
                raise Refused(f"{where} is another {type(one).__name__}")
            return
        if id(one) in self._partners or id(other) in self._met:
            if self._partners.get(id(one)) is not other:
                raise Refused(f"{where} is shared otherwise")
            return
        self._partners[id(one)] = other
        self._met[id(other)] = one  # both are kept alive: their ids stay theirs
        self._compare_content(one, other, where)

    def _compare_content(self, one: Any, other: Any, where: str) -> None:
        mine: Any
        theirs: Any
        match one:
            case torch.Tensor():
                self._compare_tensors(one, other, where)
            case np.ndarray() | np.generic():
                mine, theirs = ((a.dtype, a.shape, a.tobytes()) for a in (one, other))
                if mine != theirs:
                    raise Refused(f"{where} has other elements")
            case set() | frozenset():
                if one != other:
                    raise Refused(f"{where} has other elements")
            case types.BuiltinFunctionType():
                mine, theirs = ((each.__qualname__, each.__self__) for each in (one, other))
                self._waiting.append((mine, theirs, where))
            case types.FunctionType():
                if (one.__code__, one.__globals__) != (other.__code__, other.__globals__):
                    raise Refused(f"{where} is another function")
                self._compare_parts(children(one)[1:], children(other)[1:], where)
            case _:
                self._compare_parts(children(one), children(other), where)
        mine, theirs = getattr(one, "__dict__", None), getattr(other, "__dict__", None)
        if type(mine) is dict and type(theirs) is dict:
            self._waiting.append((mine, theirs, where))

    def _compare_parts(self, one: _Parts, other: _Parts, where: str) -> None:
        names, others = ([_name(name) for name, _ in parts] for parts in (one, other))
        if names != others:
            odd = {*names} ^ {*others}
            raise Refused(f"{where} has other entries: {sorted(map(str, odd))[:3]}")
        for name, (key, mine), (_, theirs) in zip(names, one, other, strict=True):
            if key not in _HASHES:
                self._waiting.append((mine, theirs, f"{where}.{name}"))

    def _compare_tensors(self, one: torch.Tensor, other: torch.Tensor, where: str) -> None:
        for name, read in _FACTS.items():
            if read(one) != read(other):
                raise Refused(f"{where} has {name} {read(one)} and {read(other)}")
        if one.is_meta:
            return
        if self._place(one) != self._place(other):
            raise Refused(f"{where} lies elsewhere")
        if self._place(one) is None and _bytes(one) != _bytes(other):
            raise Refused(f"{where} has other elements")

    def _place(self, tensor: torch.Tensor) -> tuple[object, int] | None:
        mapping = self._spans.find(tensor)
        if mapping is None:
            return None
        return mapping.inode, mapping.offset + tensor.data_ptr() - mapping.start


_FACTS: dict[str, Callable[[torch.Tensor], object]] = {
    "dtype": lambda tensor: tensor.dtype,
    "shape": lambda tensor: tensor.shape,
    "strides": lambda tensor: tensor.stride(),
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_leaf": lambda tensor: tensor.is_leaf,
    "device": lambda tensor: tensor.device,
    "inference": lambda tensor: tensor.is_inference(),
    # torch warns of the question otherwise
    "a gradient": lambda tensor: tensor.is_leaf and tensor.grad is not None,
    "grad_fn": lambda tensor: type(tensor.grad_fn),
}


def _bytes(tensor: torch.Tensor) -> bytes:
    # Bytes, because NaN != NaN and -0.0 == 0.0.
    flat = tensor.detach().contiguous().reshape(-1)
    content: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return content


def _name(key: Any) -> Any:
    return key if isinstance(key, _PLAIN) else f"<{type(key).__qualname__}>"
