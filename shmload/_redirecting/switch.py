"""The switch: patches the libraries while at least one redirection is open."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shmload._host.changes import add_lock
from shmload._redirecting.patches import MODULES, Options, Patch, classes_of
from shmload._wording import logger_of

logger = logger_of("shmload.redirect")


_lock = add_lock("the switch of redirect")
_open: dict[object, Options] = {}
"""The open redirections by their keys; the last one counts."""
_installed: "_Installation | None" = None


def current() -> Options | None:
    """Return how calls are redirected; None if they are not."""
    options = list(_open.values())
    return options[-1] if options else None


def turn_on(key: object, options: Options, modules: Mapping[str, ModuleType]) -> None:
    """Open a redirection; the first one patches.

    Args:
        key: names it, for `turn_off`.
        options: how calls are redirected.
        modules: imported ones that are not in `sys.modules`.
    """
    global _installed
    with _lock:
        _open[key] = options
        if _installed is None:
            _installed = _Installation()
        _installed.patch_all(modules)


def turn_off(key: object) -> None:
    """Close a redirection, if it is open; the last one restores what was patched."""
    global _installed
    with _lock:
        _open.pop(key, None)
        if not _open and _installed is not None:
            _installed.undo()
            _installed = None


class _Installation:
    """The patches, and the finder that adds to them what is imported later."""

    def __init__(self) -> None:
        self._made: dict[type, Patch] = {}
        self._finder = Finder(MODULES, self._patch)
        sys.meta_path.insert(0, self._finder)

    def patch_all(self, modules: Mapping[str, ModuleType]) -> None:
        """Patch what is imported already."""
        for name in MODULES:
            module = sys.modules.get(name) or modules.get(name)
            if module is None:
                continue
            if getattr(module.__spec__, "_initializing", False):
                module = importlib.import_module(name)  # waits for the thread that imports it
            self._patch(module)

    def _patch(self, module: ModuleType) -> None:
        try:
            with _lock:
                if _installed in (None, self):
                    for owner, kind in classes_of(module):
                        if owner not in self._made:
                            self._made[owner] = Patch(owner, kind, _route)
        except Exception:  # an import must not fail because of it
            logger.warning("%s is not redirected", module.__name__, exc_info=True)

    def undo(self) -> None:
        """Restore everything."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._made:
            self._made.popitem()[1].undo()


def _route(patch: Patch, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = current()
    if options is None:  # another program's patch still calls this one
        return patch.call_original(cls, args, kwargs)
    # Not at the top: it imports what a program may not want to wait for when it starts.
    from shmload._redirecting.calls import answer

    return answer(patch, options, cls, args, kwargs)


# What is imported later ---------------------------------------------------------------------------


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
