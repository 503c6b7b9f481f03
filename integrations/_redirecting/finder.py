"""Notices the import of some modules: calls a function when Python has executed one of them."""

import sys
from collections.abc import Callable, Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Finder:
    """Stands first in `sys.meta_path`, lets the others find a module, and waits for its end.

    Args:
        names: of the modules.
        loaded: is called with each module once it is executed. Must not raise.
    """

    def __init__(self, names: Collection[str], loaded: Callable[[ModuleType], None]) -> None:
        self._names = frozenset(names)
        self._loaded = loaded

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls the function."""
        if fullname not in self._names:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                break
        else:
            return None
        if hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "create_module"):
            spec.loader = _Loader(spec.loader, self._loaded)  # type: ignore[assignment]
        return spec


class _Loader:
    """A module's loader, which calls a function at the end; the module sees its own loader."""

    def __init__(self, loader: Any, loaded: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._loaded = loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._loaded(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
