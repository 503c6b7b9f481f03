"""What the imports of a template did: which module needed which, what they read, said and changed.

A program may not see modules that it did not import. So a template records, for each module that it
imports, everything that happened meanwhile; `stash` gives that to a program when it imports the
module itself.

This file runs before anything else is imported, so it imports nothing but what every Python has.
"""

import _warnings
import atexit
import builtins
import os
import sys

# What `import` and `importlib` call for a module that is not in `sys.modules`.
bootstrap = sys.modules["_frozen_importlib"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any


# Their finalizers give memory of this process back, and nothing else.
_UNDONE_BY_KERNEL = {"torch.library"}


class Event:
    """Something that the import of a module did, beside making the module.

    Args:
        module: its name.
        kind: `said`, `changed`, `registered` or `logged`.
        what: the descriptor and the bytes written; or the part of the interpreter's state, the
            items that went, and those that came; or a function to be called when Python ends, with
            its arguments; or the names of loggers, see `loggers`.
    """

    def __init__(self, module: str, kind: str, what: "tuple[Any, ...]") -> None:
        self.module, self.kind, self.what = module, kind, what


class Recorder:
    """Records imports from `start` to `stop`."""

    def __init__(self) -> None:
        self.needs: dict[str, set[str]] = {}
        """By module, in the order in which their imports began: the modules that were imported
        meanwhile, or were there already."""
        self.ended: list[str] = []
        """The modules whose imports have ended, in that order."""
        self.events: list[Event] = []
        self.variables: dict[str, str | None] = {}
        """Environment variables that Python code has read, with what it found."""
        self.fresh = read_state()
        """The interpreter's state before the first import."""
        self.drain: Callable[[], list[tuple[int, bytes]]] = list
        """Returns what was written since the last call: descriptors and bytes."""
        self._stack: list[str] = []

    def start(self) -> None:
        """Begin to record; go on where it was stopped."""
        importing: Any = bootstrap
        self._state, self._modules, self._loggers = read_state(), set(sys.modules), _loggers(())
        find, by_name = importing._find_and_load, importing._gcd_import
        statement, register = builtins.__import__, atexit.register

        def find_and_load(name: str, import_: "Any") -> "Any":
            self._enter(name)
            try:
                return find(name, import_)
            finally:
                self._leave()

        def gcd_import(name: str, package: "Any" = None, level: int = 0) -> "Any":
            module = by_name(name, package, level)
            self._need([importing._resolve_name(name, package, level) if level else name])
            return module

        def import_statement(
            name: str,
            globals: "Any" = None,
            locals: "Any" = None,
            fromlist: "Any" = (),
            level: int = 0,
        ) -> "Any":
            module = statement(name, globals, locals, fromlist, level)
            if level:
                name = importing._resolve_name(name, _package_of(globals), level)
            self._need([name, *(f"{name}.{item}" for item in fromlist or ())])
            return module

        def register_at_exit(function: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            if self._stack and getattr(function, "__qualname__", "") != "finalize._exitfunc":
                self._note("registered", (function, args, kwargs))
            return register(function, *args, **kwargs)

        self._before = _put([
            (importing, "_find_and_load", find_and_load),
            (importing, "_gcd_import", gcd_import),
            (builtins, "__import__", import_statement),
            (atexit, "register", register_at_exit),
            (os.environ, "__class__", _watching(type(os.environ), self.variables)),
        ])  # fmt: skip

    def stop(self) -> None:
        """End it; everything is as before `start`."""
        _put(self._before)

    def _enter(self, name: str) -> None:
        self._settle()
        self._need([name])
        self.needs.setdefault(name, set())
        self._stack.append(name)

    def _leave(self) -> None:
        self._settle()
        self.ended.append(self._stack.pop())

    def _settle(self) -> None:
        """Charge what has happened since the last step to the module that is being imported."""
        state, said = read_state(), self.drain()
        changes = differences(self._state, state)
        self._state = state
        if not self._stack:
            return
        for change in changes:
            self._note("changed", change)
        for written in said:
            self._note("said", written)
        self._settle_loggers()
        if len(sys.modules) != len(self._modules):
            for name in set(sys.modules) - self._modules - self.needs.keys():
                self._need([name])  # a module puts some there by hand
                self.needs[name] = set()
            self._modules = set(sys.modules)

    def _settle_loggers(self) -> None:
        known, before = self._loggers
        names, root = _loggers(known)
        is_changed = before is not None and root != before
        if names or is_changed:
            self._note("logged", (*names, "") if is_changed else names)
        self._loggers = (known + names, root)

    def _note(self, kind: str, what: "tuple[Any, ...]") -> None:
        self.events.append(Event(self._stack[-1], kind, what))

    def _need(self, names: "Iterable[str]") -> None:
        if not self._stack:
            return
        needs = self.needs[self._stack[-1]]
        for name in names:
            while name:
                needs.add(name)
                name = name.rpartition(".")[0]


def _put(attributes: "list[tuple[Any, str, Any]]") -> "list[tuple[Any, str, Any]]":
    """Set attributes of objects; return what was there before."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    return before


# The interpreter's state ----------------------------------------------------------------------


def read_state() -> "dict[str, list[Any]]":
    """Return what imports change in the interpreter, as lists of comparable items."""
    finalize = _finalize()
    found = {name: list(items) for name, items in _lists().items()}
    found["finalizers"] = list(finalize._registry) if finalize else []
    # `_data` is read without being noticed by the record.
    found["environ"] = list(os.environ._data.items())  # type: ignore[attr-defined]
    return found


def change_state(name: str, went: "list[Any]", came: "list[Any]") -> None:
    """Change one part of the state: remove some items and put others in front."""
    if name == "environ":
        for variable, _ in went:
            os.environ.pop(os.fsdecode(variable), None)
        for variable, value in came:
            os.environ[os.fsdecode(variable)] = os.fsdecode(value)
    elif name == "finalizers":
        for finalizer in came:
            if alive := finalizer.peek():
                home = getattr(alive[1], "__module__", None)
                finalizer.atexit = home not in _UNDONE_BY_KERNEL
    else:
        items = _lists()[name]
        for item in went:
            if item in items:
                items.remove(item)
        # Filters are put in front, and so are most finders and paths.
        items[:0] = [item for item in came if item not in items]
        if name == "filters":
            _warnings._filters_mutated()  # type: ignore[attr-defined]


def differences(
    before: "dict[str, list[Any]]", after: "dict[str, list[Any]]"
) -> "list[tuple[str, list[Any], list[Any]]]":
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


def do_again(event: Event) -> None:
    """Do what an import has done, in a program that makes this import."""
    match event.kind:
        case "said":
            fd, raw = event.what
            _write_again(sys.stdout if fd == 1 else sys.stderr, fd, raw)
        case "changed":
            change_state(*event.what)
        case "registered":
            function, args, kwargs = event.what
            atexit.register(function, *args, **kwargs)


def _write_again(stream: "Any", fd: int, raw: bytes) -> None:
    """Write what an import has written, to the stream that the program has for that now."""
    if stream is None:
        return
    stream.flush()
    try:
        is_plain = stream.fileno() == fd
    except (AttributeError, OSError, ValueError):  # a stream in memory
        is_plain = False
    if is_plain:
        os.write(fd, raw)
    else:
        stream.write(raw.decode(errors="replace"))


def forget_exits(last: "Callable[[], None]") -> None:
    """Have nothing called when Python ends, but this after all that a program registers."""
    atexit._clear()
    atexit.register(last)
    finalize = _finalize()
    if finalize:
        for finalizer in list(finalize._registry):
            finalizer.atexit = False
        # It also tells the finalizers not to run once modules are taken apart.
        atexit.register(finalize._exitfunc)


def _finalize() -> "Any":
    """Return the class `weakref.finalize`, once its module is imported; else None."""
    return getattr(sys.modules.get("weakref"), "finalize", None)


def _lists() -> "dict[str, list[Any]]":
    return {
        # `catch_warnings` puts another list into the module for its time.
        "filters": getattr(sys.modules.get("warnings"), "filters", _warnings.filters),
        "path": sys.path,
        "meta_path": sys.meta_path,
        "path_hooks": sys.path_hooks,
    }


def _loggers(known: "tuple[str, ...]") -> "tuple[tuple[str, ...], Any]":
    """Return the names of loggers beyond these, and the root logger's level and handlers."""
    root: Any = getattr(sys.modules.get("logging"), "root", None)
    if not hasattr(root, "manager"):  # logging is not imported, or just now
        return (), None
    found = root.manager.loggerDict  # names stay in the order in which they came
    names = tuple(list(found)[len(known) :]) if len(found) > len(known) else ()
    return names, (root.level, list(root.handlers))


def _package_of(namespace: "Any") -> str:
    package = namespace.get("__package__")
    if package is None:
        package = namespace["__name__"]
        if "__path__" not in namespace:
            package = package.rpartition(".")[0]
    return str(package)


def _watching(kind: "Any", read: "dict[str, str | None]") -> "Any":
    """Return a class of `os.environ` that notes which variables are looked up."""
    listed: list[str] = []
    copied: list[str] = []

    class Watched(kind):  # type: ignore[misc]
        def __iter__(self) -> "Iterator[str]":
            copied.clear()
            names = list(super().__iter__())
            for name in names:
                listed[:] = [name]
                yield name
            listed.clear()
            copied[:] = names[::-1]  # `dict(os.environ)` looks them up only now, in their order

        def __getitem__(self, name: str) -> str:
            # A copy of all variables is made; that is no interest in one.
            if listed == [name]:
                return str(super().__getitem__(name))
            if copied and copied.pop() == name:
                return str(super().__getitem__(name))
            copied.clear()
            try:
                value = super().__getitem__(name)
            except KeyError:
                read.setdefault(name, None)
                raise
            read.setdefault(name, value)
            return str(value)

        def __contains__(self, name: object) -> bool:
            return self.get(name) is not None

    return Watched
