"""The libraries that the template has imported and the program has not yet: hidden as one.

A program finds in `sys.modules` what any Python has, what it has imported, and modules of the
standard library that the libraries need. When it imports one of the libraries, it gets all of them,
with what their imports have said and changed.
"""

import _warnings
import atexit
import contextlib
import copy
import copyreg
import ctypes
import logging
import os
import sys
import warnings
import weakref
from _thread import RLock
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from shmload._templates.variables import differences, read_on_import, with_settings

StartOver = Callable[[str, list[list[str]]], None]
_State = dict[str, list[Any]]
_Changes = list[tuple[str, list[Any], list[Any]]]
_MAPPINGS: dict[str, MutableMapping[Any, Any]] = {
    "environ": os.environ,
    "picklers": copyreg.dispatch_table,
}
# The function of Python that imports a module; others look for one only to know of it.
_IMPORTS = "_find_and_load_unlocked"


class Hidden(MetaPathFinder):
    """The hidden modules, and the finder that gives them to the program.

    Args:
        known: names of the modules that any Python has from its start.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = {*known, "__mp_main__"}
        self._before = _read_state()
        self.modules: dict[str, ModuleType] = {}
        """The hidden modules, by name."""
        self._all: dict[str, ModuleType] = {}
        """These, and what the imports have brought of the standard library."""
        self._names: frozenset[str] = frozenset()
        self._changes: _Changes = []
        """What the imports have changed."""
        self.said = b""
        """What the imports have written."""
        self._loggers: frozenset[str] = frozenset()
        self._is_given = False
        self._lock = RLock()
        """Held while modules are given: programs import in several threads."""
        # The last of all: what is registered first is called last.
        atexit.unregister(logging.shutdown)
        atexit.register(self._take_out_all)
        atexit.register(logging.shutdown)
        os.register_at_fork(after_in_child=self._lock._at_fork_reinit)  # type: ignore[attr-defined]

    # In the template ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Import modules in a block; they are hidden after it."""
        sys.modules.update(self.modules)
        _change(self._changes)
        yield
        self._hide()

    def _hide(self) -> None:
        self._changes = _changes(self._before, _read_state())
        _change(_changes(_read_state(), self._before))
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False
        self._all = {n: module for n, module in sys.modules.items() if n not in self._known}
        names = [name for name in self._all if not _is_of_python(name)]
        self.modules = {name: sys.modules.pop(name) for name in names}
        self._loggers = frozenset(logging.root.manager.loggerDict)
        # To look at all modules in a program would mean to copy their pages.
        self._names = frozenset(self._all)
        # Never freed: Python would take all of this apart when the program ends, for nothing.
        for kept in (self._all, sys.path_importer_cache):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def shadowed_in(self, folder: str) -> str | None:
        """Return a module of the template that a file in this directory would replace, or None.

        A directory without `__init__.py` would not: it ranks behind all entries of the path.
        """
        try:
            names = {entry.partition(".")[0] for entry in os.listdir(folder or ".")}
        except OSError:
            return None
        for name in sorted(names & self._names):
            module = self.modules.get(name) or sys.modules.get(name)
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            found = PathFinder.find_spec(name, [folder or os.getcwd()])
            if found and found.loader and found.origin != origin:
                return name
        return None

    # In the program -------------------------------------------------------------------------------

    def begin(self, settings: list[list[str]], start_over: StartOver) -> None:
        """Give the modules to the program from now on, which begins.

        Args:
            settings: the variables that it is going to set, as the template has them.
            start_over: called if the program has other modules, or has changed what libraries have
                read already, with the reason and all variables that it has set. It runs the program
                again in the ordinary way, or returns if that is not possible any more.
        """
        self._start_over = start_over
        self._path = list(sys.path)
        self._begun = read_on_import(os.environ)
        self._wanted = with_settings(self._begun, settings)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to get a hidden module; None for any other."""
        module = self.modules.get(name)
        if module is None or target is not None:
            return None
        own = getattr(module, "__spec__", None)
        spec = copy.copy(own) if own else ModuleSpec(name, None)
        spec.name, spec.loader = name, _Given(self, module, own)
        if sys._getframe(2).f_code.co_name == _IMPORTS:
            with self._lock:
                self.give()
                if sys.modules.get(name) is not module:
                    return None  # the program has removed it, to import it anew
                # The import goes by the spec of the module that it now finds there.
                module.__spec__ = spec
        return spec

    def give(self) -> None:
        """Give all modules to the program; nothing the second time."""
        with self._lock:
            if self._is_given:
                return
            self._check()
            self._is_given = True
            sys.modules.update({n: m for n, m in self.modules.items() if n not in sys.modules})
            _change(self._changes)
            for name in self._loggers:  # `logging.config` disables the loggers that exist
                vars(logging.root.manager.loggerDict[name])["disabled"] = False
            if self.said and sys.stderr:
                sys.stderr.write(self.said.decode(errors="replace"))

    def _check(self) -> None:
        """Start over if the program has changed what the imports would find."""
        now = read_on_import(os.environ)
        settings = differences(self._begun, now)
        if changed := differences(self._wanted, now):
            name = changed[0][0]
            sets = "set" if now.get(name) != self._begun.get(name) else "did not set"
            self._start_over(f"the program {sets} {name} before it imported a library", settings)
        both = sorted(self.modules.keys() & sys.modules.keys())
        # What has no spec is no file's: each module of Cython looks for the same `cython_runtime`.
        if own := [n for n in both if getattr(self.modules[n], "__spec__", None)]:
            self._start_over(f"the program has a module {own[0]} of its own", settings)
        for folder in [entry for entry in sys.path if entry not in self._path]:
            if name_ := self.shadowed_in(folder):
                self._start_over(f"the program has put another {name_} on its path", settings)

    def _take_out_all(self) -> None:
        """Keep Python from taking the template's modules apart when a program ends.

        It would copy thousands of pages to that end, 0.1 s of them with the libraries. The
        program's own modules go as ever.
        """
        # Not the other way around: to look at a module that was not given means to copy its page.
        for name, module in list(sys.modules.items()):
            if self._all.get(name) is module:
                del sys.modules[name]


class _Given(Loader):
    """The loader of a hidden module: it gives all; what else is asked its own loader does.

    Args:
        hidden: has the modules.
        module: the one that is imported.
        spec: its own.
    """

    def __init__(self, hidden: Hidden, module: ModuleType, spec: ModuleSpec | None) -> None:
        self._hidden, self._module, self._spec = hidden, module, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the hidden module."""
        self._hidden.give()
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced."""
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_spec"].loader, name)


def _is_of_python(name: str | None) -> bool:
    """Tell whether a module is of the standard library."""
    return (name or "").partition(".")[0] in sys.stdlib_module_names


# What imports change in the interpreter ----------------------------------------------------------


def _lists() -> _State:
    return {
        # `catch_warnings` puts another list into the module for its time.
        "filters": warnings.filters,  # type: ignore[dict-item]
        "path": sys.path,
        "meta_path": sys.meta_path,
        "path_hooks": sys.path_hooks,
        "handlers": logging.root.handlers,
    }


def _read_state() -> _State:
    """Return what imports change in the interpreter, as lists of comparable items."""
    found = {name: list(items) for name, items in _lists().items()}
    return found | {name: list(items.items()) for name, items in _MAPPINGS.items()}


def _changes(before: _State, after: _State) -> _Changes:
    """Return what has changed, part by part: its name, items that went, and items that came."""
    return [
        (
            name,
            [item for item in before[name] if item not in after[name]],
            [item for item in after[name] if item not in before[name]],
        )
        for name in before
        if before[name] != after[name]
    ]


def _change(changes: _Changes) -> None:
    """Remove some items of each part of the state, and put others in front."""
    for name, went, came in changes:
        if name in _MAPPINGS:
            mapping = _MAPPINGS[name]
            for key, _ in went:
                mapping.pop(key, None)
            mapping.update(came)
        else:
            items = _lists()[name]
            items[:] = [item for item in items if item not in went]
            # Filters are put in front, and so are most finders and paths.
            items[:0] = [item for item in came if item not in items]
    _warnings._filters_mutated()  # type: ignore[attr-defined]
