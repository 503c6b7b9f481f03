"""Keeps the path of a view out of what is built from it, and out of its errors.

A pipeline is built from a view, but it and its errors must speak of the source.
"""

import os
import types
from pathlib import Path
from typing import Any

import torch

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.Tensor)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
# Attributes of every module, which never hold a path and would take most of the time.
_INTERNALS = frozenset(vars(torch.nn.Module())) - {"_modules"}
_VOCABULARY_COUNT = 10_000


class PathRepair:
    """Replaces paths below a view by those of the source.

    Args:
        view: the view's directory.
        root: the path of the source's directory, as the libraries would write it.
        given: the source as the user named it; replaces the view's directory itself.
    """

    def __init__(self, view: Path, root: str, given: str | os.PathLike[str]) -> None:
        self._view = str(view)
        self._root = root
        self._given = given

    def text(self, text: str) -> str:
        """Repair a text that mentions paths."""
        below = text.replace(f"{self._view}/", f"{self._root.rstrip('/')}/")
        return below.replace(self._view, os.fspath(self._given))

    def repair(self, pipe: object) -> None:
        """Repair every string reachable from a pipeline through attributes and containers.

        Args:
            pipe: where to begin; for a tuple, in each of its items.
        """
        seen: set[int] = set()
        waiting = list(pipe) if isinstance(pipe, tuple) else [pipe]
        while waiting:
            container = waiting.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            if isinstance(container, dict):
                self._repair_dict(container, waiting)
            elif isinstance(container, list):
                for place, value in enumerate(container):
                    container[place] = self._repaired(value, waiting)
            attributes = getattr(container, "__dict__", None)
            if isinstance(attributes, dict):
                waiting.append(attributes)

    def _repair_dict(self, container: dict[Any, Any], waiting: list[Any]) -> None:
        is_module = "_parameters" in container and "_modules" in container
        for key, value in list(container.items()):
            if is_module and key in _INTERNALS:
                continue
            repaired = self._repaired(value, waiting)
            if repaired is not value:
                # Not container[key] = ...: diffusers' FrozenDict forbids that.
                dict.__setitem__(container, key, repaired)

    def _repaired(self, value: Any, waiting: list[Any]) -> Any:
        """Return a value with its paths replaced; queue it if others may hang from it."""
        if isinstance(value, str):
            if self._view not in value:
                return value
            return self._given if value == self._view else self.text(value)
        if isinstance(value, Path):
            return Path(self.text(str(value))) if self._view in str(value) else value
        if type(value) is tuple:
            repaired = tuple(self._repaired(item, waiting) for item in value)
            return value if all(a is b for a, b in zip(value, repaired, strict=True)) else repaired
        # Empty dicts of hooks, and vocabularies, would take most of the time.
        is_worth_it = not isinstance(value, (dict, list)) or 0 < len(value) < _VOCABULARY_COUNT
        if is_worth_it and not isinstance(value, (*_LEAVES, *_CODE)):
            waiting.append(value)
        return value
