"""Modules that the template has imported and the program has not yet: hidden until it does.

A program sees in `sys.modules` what it has imported and no more. When it imports a module of the
stash, it gets that module and all that its import would have brought, with what that import would
have said and changed.
"""

import ctypes
import os
import sys
from _thread import RLock, get_ident
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from shmload._templates.loggers import Loggers
from shmload._templates.neutral import LAZY_TABLES
from shmload._templates.recorder import (
    Event,
    Recorder,
    bootstrap,
    change_state,
    differences,
    do_again,
    forget_exits,
    read_state,
)
from shmload._templates.variables import ReadVariables

StartOver = Callable[[str, list[list[str]] | None], None]


class _Given(Loader):
    """The loader of a hidden module: the stash gives it; all else its own loader does.

    Args:
        stash: has the module.
        own: the loader that has made it.
    """

    def __init__(self, stash: "Stash", own: Any) -> None:
        self._stash, self._own = stash, own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the hidden module."""
        module = self._stash.take(spec.name)
        if spec.loader_state is None:
            spec.loader_state = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("_own"), name)


class Stash(MetaPathFinder):
    """The hidden modules, and the finder that gives them back.

    Args:
        recorder: of their imports.
        known: names of the modules that any Python has from its start.
    """

    def __init__(self, recorder: Recorder, known: Collection[str]) -> None:
        self._recorder = recorder
        self._known = known
        self._start_over: StartOver = lambda reason, settings: None
        self.names: frozenset[str] = frozenset()
        """All modules of the template, once they are hidden."""
        self._tops: set[str] = set()
        self._modules: dict[str, ModuleType] = {}
        self._ever_hidden: dict[str, ModuleType] = {}
        """All that were ever hidden, also those that were given since."""
        self._cut: dict[str, ModuleType] = {}
        """Packages that do not show a module while it is hidden, by its name."""
        self._events: dict[str, list[tuple[int, Event]]] = {}
        """By module: what its import did, with its place in the record."""
        self._loggers = Loggers()
        main = sys.modules["__main__"]
        self._of_main = [
            (name, attribute)
            for name, module in sys.modules.items()
            if name not in known and type(module) is ModuleType
            for attribute, value in vars(module).items()
            if value is main
        ]
        """Attributes of hidden modules that are the main module: the modules' names, and theirs."""
        self._lock = RLock()
        """Held while modules are given: programs import in several threads."""
        os.register_at_fork(after_in_child=self._lock._at_fork_reinit)  # type: ignore[attr-defined]
        self._path: list[str] = []
        self.variables = ReadVariables(recorder.variables)
        self._counted = 0
        """How many events of the record are in `_events`."""
        self._places: dict[str, int] = {}
        """By module, its place in the order in which the imports ended."""

    def hide(self) -> None:
        """Take all modules out of `sys.modules` but those that any Python has.

        Modules that were imported before work as ever. Call it again after `show_all`.
        """
        forget_exits(self._take_out_all)
        for change in differences(read_state(), self._recorder.fresh):
            if change[0] != "environ":
                change_state(*change)
        self.names = frozenset(sys.modules)
        self._tops = {name for name in self.names if "." not in name} - set(self._known)
        before = self._modules
        hidden = [name for name in sys.modules if name not in self._known]
        self._modules = {name: sys.modules.pop(name) for name in hidden}
        # The main module's second name is no hidden module, and has its place nevertheless.
        second = {n: place for n, place in self._places.items() if n == "__mp_main__"}
        self._places = second | {name: place for place, name in enumerate(hidden)}
        new = [name for name in hidden if name not in before]
        # A reference would keep the main module from being the first that goes when Python ends.
        # `multiprocessing` gives it this second name.
        self._modules.pop("__mp_main__", None)
        self._ever_hidden |= self._modules
        for name, attribute in self._of_main:
            vars(self._modules[name]).pop(attribute, None)
        for name, module in self._modules.items():
            parent, _, leaf = name.rpartition(".")
            owner = self._modules.get(parent) or sys.modules.get(parent)
            # What a package has put into `sys.modules` by itself is its own attribute.
            if owner and _is_imported(module, name) and vars(owner).get(leaf) is module:
                delattr(owner, leaf)
                self._cut[name] = owner
        for module in self._modules.values():
            _forget_lazy_names(module)
        # Never freed: Python would take all of this apart when the program ends, for nothing.
        for kept in (self, self._modules, self._recorder.needs, self._recorder.variables):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        for name in new:  # most of what they need are names in modules, or any Python's
            self._recorder.needs.setdefault(name, set()).intersection_update(self._modules)
        for place, event in enumerate(self._recorder.events):
            if place >= self._counted:
                self._events.setdefault(event.module, []).append((place, event))
        self._counted = len(self._recorder.events)
        self._loggers.hide()

    def show_all(self) -> None:
        """Have all modules in `sys.modules`, for code of the template."""
        sys.modules.update(self._modules)
        self._loggers.show_all()
        for name, owner in self._cut.items():
            setattr(owner, name.rpartition(".")[2], self._modules[name])

    @property
    def hidden(self) -> Mapping[str, ModuleType]:
        """The modules that are hidden now, by name."""
        return self._modules

    def __contains__(self, name: object) -> bool:
        """Tell whether a module is hidden now."""
        return name in self._modules

    def drop(self, name: str) -> bool:
        """Have a module be found in its file again, as if the template had not imported it.

        Returns:
            False if another hidden module needs it, and would have the one of the template.
        """
        parent = name.rpartition(".")[0]
        if parent in self._modules and name in self._closure([parent]):
            return True  # it comes with its package, as from its file
        if any(name in needs for other, needs in self._recorder.needs.items() if other != name):
            return False
        self._modules.pop(name, None)
        self._cut.pop(name, None)
        return True

    def begin(self, settings: list[list[str]], start_over: StartOver | None = None) -> None:
        """Give modules to the program from now on, which begins.

        Args:
            settings: the variables that it is going to set, as the template has them.
            start_over: called if the program changes what libraries have read already, with the
                reason and with the variables that it has set. It runs the program again in the
                ordinary way, or returns if that is not possible any more.
        """
        if start_over:
            self._start_over = start_over
        for name in list(sys.modules):
            if name not in self._known:
                del sys.modules[name]  # imported since by the code that prepares the program
        self._path = list(sys.path)
        self.variables.begin(settings)
        sys.meta_path.insert(0, self)

    def _take_out_all(self) -> None:
        """Keep Python from taking the template's modules apart when a program ends.

        It would copy thousands of pages to that end, 0.1 s of them with the libraries. The
        program's own modules go as ever.
        """
        for name, module in self._ever_hidden.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def shadowed_in(self, folder: str) -> str | None:
        """Return a hidden module that a file in this directory would replace, or None."""
        try:
            names = {entry.partition(".")[0] for entry in os.listdir(folder or ".")}
        except OSError:
            return None
        found = sorted(names & self._tops)
        for name in found:
            if self._is_another(name, [folder or os.getcwd()]):
                return name
        return None

    def _is_another(self, name: str, path: list[str]) -> bool:
        """Tell whether these directories have a module of this name that is not the hidden one."""
        found = PathFinder.find_spec(name, path)
        module = self._modules.get(name) or sys.modules.get(name)
        own = getattr(module, "__spec__", None)
        if found is None or own is None:
            return found is not None
        # A directory without `__init__.py` ranks behind all entries of the path, but joins others.
        return own.origin != found.origin if found.loader else own.origin is None

    # As a finder and loader ----------------------------------------------------------------------

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to get a hidden module; None for any other."""
        with self._lock:
            if name not in self._modules:
                spec = getattr(sys.modules.get(name), "__spec__", None)
                return spec if isinstance(getattr(spec, "loader", None), _Given) else None
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names:
                self._check_variables()
            if top == name and self._is_shadowed(name):
                del self._modules[name]
                return None
            return self._spec_of(name, self._modules[name])

    def _spec_of(self, name: str, module: ModuleType) -> ModuleSpec:
        own = getattr(module, "__spec__", None)
        spec = ModuleSpec(name, _Given(self, own and own.loader))
        if own is not None:  # as `importlib.util.find_spec` would have found it
            spec.origin, spec.cached, spec.has_location = own.origin, own.cached, own.has_location
            spec.submodule_search_locations = own.submodule_search_locations
        return spec

    def take(self, name: str) -> ModuleType:
        """Return a hidden module to the import system, and give all that it needs."""
        with self._lock:
            if name in self._modules:
                self._give(self._closure([name]), but=name)
                return self._modules.pop(name)
            return sys.modules[name]  # an import in another thread, which needs it, was quicker

    def _give(self, wanted: set[str], but: str = "") -> None:
        """Give modules; the import system itself gives the one that is imported."""
        barred = [name for name in sorted(wanted) if sys.modules.get(name, name) is None]
        if barred:
            self._start_over(f"the program bars the import of {barred[0]}", None)
        given: dict[str, ModuleType] = {}
        second = {"__mp_main__"} & self._places.keys() if "multiprocessing" in wanted else set()
        for found in sorted(wanted | second, key=self._places.__getitem__):
            if found in second:
                given[found] = sys.modules["__main__"]
            elif found != but:
                given[found] = self._modules[found]
                if found in self._cut:
                    setattr(self._cut.pop(found), found.rpartition(".")[2], given[found])
        # At once: code of one that another thread runs needs the others.
        self._lead_imports(given)
        sys.modules.update(given)
        self._lead_imports(given)  # those that have begun meanwhile
        for found in given:
            self._modules.pop(found, None)
        for owner, attribute in self._of_main:
            if owner in wanted:
                vars(sys.modules.get(owner) or self._modules[owner])[attribute] = sys.modules[
                    "__main__"
                ]
        self._of_main = [pair for pair in self._of_main if pair[0] not in wanted]
        placed = [each for found in wanted for each in self._events.pop(found, ())]
        events = [event for _, event in sorted(placed, key=lambda each: each[0])]
        self._loggers.show([n for event in events if event.kind == "logged" for n in event.what])
        for event in events:
            do_again(event)
            if event.kind == "changed" and event.what[0] == "environ":
                pairs = (*event.what[1], *event.what[2])
                self.variables.note_import({os.fsdecode(name) for name, _ in pairs})

    def _lead_imports(self, given: Mapping[str, ModuleType]) -> None:
        """Have imports of these modules that are under way in other threads end here.

        Such an import goes by the spec of the module that it finds in `sys.modules`, and would run
        the module a second time by the module's own.
        """
        # Not all that are given: to look at one means to copy its page.
        for name in filter(_is_imported_elsewhere, given.keys() & bootstrap._module_locks.keys()):
            module = given[name]
            own = getattr(module, "__spec__", None)
            if not isinstance(getattr(own, "loader", 0), _Given):
                spec = self._spec_of(name, module)
                spec.loader_state = own
                module.__spec__ = spec

    def _closure(self, names: Sequence[str]) -> set[str]:
        """Return the names of all hidden modules that the import of some needs, and their own."""
        found = {*names}
        waiting = [*names]
        while waiting:
            new = (self._recorder.needs[waiting.pop()] - found) & self._modules.keys()
            found |= new
            waiting += new
        return found

    # What comes too late --------------------------------------------------------------------------

    def _check_variables(self) -> None:
        change = self.variables.change()
        if change:
            self._start_over(*change)

    def _is_shadowed(self, name: str) -> bool:
        new = [entry or os.getcwd() for entry in sys.path if entry not in self._path]
        if not new or not self._is_another(name, new):
            return False
        if any(name in needs for other, needs in self._recorder.needs.items() if other != name):
            self._start_over(f"the program has put another {name} on its path", None)
        return True


def _is_imported_elsewhere(name: str) -> bool:
    """Tell whether another thread is just importing a module."""
    lock: Any = bootstrap._module_locks.get(name, lambda: None)()
    return lock is not None and lock.owner not in (None, get_ident())


def _forget_lazy_names(module: ModuleType) -> None:
    """Have a package import again what it imports on first use: it keeps that as attributes."""
    for table in LAZY_TABLES:
        names = vars(module).get(table)
        if isinstance(names, dict):
            for name in names.keys() & vars(module).keys():
                delattr(module, name)


def _is_imported(module: ModuleType, name: str) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.name == name
