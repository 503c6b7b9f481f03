"""The libraries that the template has imported and the program has not yet: hidden as one.

A program finds in `sys.modules` what any Python has, what it has imported, and modules of the
standard library that the libraries need. When it imports one of the libraries, it gets all of them,
with what their imports have said and changed.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import sys
from _thread import RLock, get_ident
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from shmload._templates.state import (
    Changes,
    Exits,
    change_state,
    differences,
    forget_exits,
    read_state,
    register_exits,
)
from shmload._templates.variables import differences as differences_of
from shmload._templates.variables import read_on_import, with_settings

StartOver = Callable[[str, list[list[str]]], None]


class Hidden(MetaPathFinder):
    """The hidden modules, and the finder that gives them to the program.

    Args:
        known: names of the modules that any Python has from its start.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._before = read_state()
        self.modules: dict[str, ModuleType] = {}
        """The hidden modules, by name."""
        self._all: dict[str, ModuleType] = {}
        """These, and what the imports have brought of the standard library."""
        self._changes: Changes = []
        """What the imports have changed."""
        self._exits: Exits = []
        """What the imports have registered to be called at the end."""
        self.said = b""
        """What the imports have written."""
        self._loggers: list[logging.Logger] = []
        self.named: list[str] = []
        """The modules that the template was told to import."""
        self._is_given = False
        self._lock = RLock()
        """Held while modules are given: programs import in several threads."""
        os.register_at_fork(after_in_child=self._lock._at_fork_reinit)  # type: ignore[attr-defined]

    # In the template ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Import modules in a block; they are hidden after it."""
        sys.modules.update(self.modules)
        change_state(self._changes)
        register = atexit.register

        def note(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._exits.append((function, args, kwargs))
            return register(function, *args, **kwargs)

        atexit.register = note  # type: ignore[assignment]
        yield
        atexit.register = register
        self._hide()

    def _hide(self) -> None:
        self._changes = differences(self._before, read_state())
        change_state(differences(read_state(), self._before))
        forget_exits(self._take_out_all)
        register_exits([each for each in self._exits if _is_of_python(_home_of(each[0]))])
        known = {*self._known, "__mp_main__"}
        self._all = {name: m for name, m in sys.modules.items() if name not in known}
        names = [name for name in self._all if not _is_of_python(name)]
        self.modules = {name: sys.modules.pop(name) for name in names}
        loggers = logging.root.manager.loggerDict.items()
        self._loggers = [
            each
            for name, each in loggers
            if isinstance(each, logging.Logger) and not _is_of_python(name)
        ]
        # Never freed: Python would take all of this apart when the program ends, for nothing.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._all))

    def shadowed_in(self, folder: str) -> str | None:
        """Return a module of the template that a file in this directory would replace, or None."""
        try:
            names = {entry.partition(".")[0] for entry in os.listdir(folder or ".")}
        except OSError:
            return None
        own = {name for name in (*self.modules, *sys.modules) if name not in self._known}
        for name in sorted(names & own):
            if self._is_another(name, [folder or os.getcwd()]):
                return name
        return None

    def _is_another(self, name: str, path: list[str]) -> bool:
        """Tell whether these directories have a module of this name that is not the hidden one."""
        found = PathFinder.find_spec(name, path)
        module = self.modules.get(name) or sys.modules.get(name)
        own = getattr(module, "__spec__", None)
        if found is None or own is None:
            return found is not None
        # A directory without `__init__.py` ranks behind all entries of the path, but joins others.
        return own.origin != found.origin if found.loader else own.origin is None

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
        with self._lock:
            if self._is_given and sys.modules.get(name) is not module:
                return None  # the program has removed it, to import it anew
            spec = _spec_of(name, module, _Given(self, module))
            if self._is_given:  # meanwhile, by another thread: the import goes by the module's own
                module.__spec__ = spec
            return spec

    def give(self) -> None:
        """Give all modules to the program; nothing the second time."""
        with self._lock:
            if self._is_given:
                return
            self._check()
            self._is_given = True
            given = {name: m for name, m in self.modules.items() if name not in sys.modules}
            self._lead_imports()
            sys.modules.update(given)
            self._lead_imports()  # those that have begun meanwhile
            change_state(self._changes)
            register_exits([e for e in self._exits if not _is_of_python(_home_of(e[0]))])
            for logger in self._loggers:  # a program disables those that there are
                logger.disabled = False
            if self.said and sys.stderr:
                sys.stderr.write(self.said.decode(errors="replace"))

    def _check(self) -> None:
        """Start over if the program has changed what the imports would find."""
        now = read_on_import(os.environ)
        settings = differences_of(self._begun, now)
        if changed := differences_of(self._wanted, now):
            name = changed[0][0]
            sets = "set" if now.get(name) != self._begun.get(name) else "did not set"
            self._start_over(f"the program {sets} {name} before it imported a library", settings)
        if own := sorted(self.modules.keys() & sys.modules.keys()):
            self._start_over(f"the program has a module {own[0]} of its own", settings)
        for folder in [entry for entry in sys.path if entry not in self._path]:
            if name_ := self.shadowed_in(folder):
                self._start_over(f"the program has put another {name_} on its path", settings)

    def _lead_imports(self) -> None:
        """Have imports of the modules that are under way in other threads end here.

        Such an import goes by the spec of the module that it finds in `sys.modules`, and would run
        the module a second time by the module's own.
        """
        locks = vars(sys.modules["_frozen_importlib"])["_module_locks"]
        for name in self.modules.keys() & locks.keys():
            lock = locks.get(name, lambda: None)()
            module = self.modules[name]
            own = getattr(module, "__spec__", None)
            is_elsewhere = lock is not None and lock.owner not in (None, get_ident())
            if is_elsewhere and not isinstance(getattr(own, "loader", None), _Given):
                module.__spec__ = _spec_of(name, module, _Given(self, module))

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
    """

    def __init__(self, hidden: Hidden, module: ModuleType) -> None:
        self._hidden, self._module = hidden, module
        self._spec = getattr(module, "__spec__", None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the hidden module."""
        self._hidden.give()
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced."""
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_spec"].loader, name)


def _spec_of(name: str, module: ModuleType, loader: _Given) -> ModuleSpec:
    """Return the spec of a hidden module, as `importlib.util.find_spec` would have found it."""
    own = getattr(module, "__spec__", None)
    spec = ModuleSpec(name, loader)
    if own is not None:
        spec.origin, spec.cached, spec.has_location = own.origin, own.cached, own.has_location
        spec.submodule_search_locations = own.submodule_search_locations
    return spec


def _is_of_python(name: str | None) -> bool:
    """Tell whether a module is of the standard library."""
    return (name or "").partition(".")[0] in sys.stdlib_module_names


def _home_of(function: Any) -> str | None:
    """Return the module of a function; None for some of C."""
    return getattr(function, "__module__", None)
