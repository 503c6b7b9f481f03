"""Whether what a pipeline was built of and by is still the same: files, code, settings.

It compares, and runs no code of a library but the look-up in packages that import lazily.
"""

import builtins
import ctypes
import os
import sys
import warnings
from array import array
from collections.abc import Container, Iterator, Mapping
from types import FunctionType, ModuleType

import torch

from shmload._building.libraries import what_is_behind
from shmload._building.state import Tables, constants, modes, modules, why_other
from shmload._compat import lazy_names
from shmload._host.fingerprint import Fingerprint, files_below

_OTHER_VARIABLES = {"SHMLOAD_REDIRECT"}  # says how a call came here, not what it does
_BUILTINS = frozenset(name for name in vars(builtins) if not name.startswith("_"))
_OF_PROGRAMS = {"__main__", "__mp_main__"}
_VARIABLES = ("DIFFUSERS_", "HF_", "SHMLOAD_", "TRANSFORMERS_")

# After the count of references, the type and the number of entries.
_VERSION_OFFSET = 24

# By id of a module: its name, itself, and its code.
_noted: dict[int, tuple[str, ModuleType, dict[str, object]]] = {}


def note_code() -> None:
    """Note the code of all modules that are imported now, for all `Facts` of its copies.

    To note it writes to the memory of every function; copies share what is noted here.
    """
    _noted.update(
        (id(each), (name, each, _code_in(each)))
        for name, each in modules()
        if name not in _OF_PROGRAMS
    )


class Facts:
    """What a build depends on, as it was at one moment.

    Args:
        folder: of the source.
        files: those below it, as they were before the build.
        built: what was built; its classes count, those of modules in it, and of configurations.
    """

    def __init__(
        self, folder: str, files: Mapping[str, Fingerprint | None], built: list[object]
    ) -> None:
        self._folder = folder
        self._files = files
        self._modes, self._variables = modes(), variables_now()
        self._tables = Tables()
        self._code = [
            _noted.get(id(module)) or (home, module, _code_in(module))
            for home, module in modules()
            if home not in _OF_PROGRAMS
        ]
        self._homes = {home: module for home, module, _ in self._code}
        self._dicts = array("Q", [id(vars(owner)) for _, owner, _ in self._code])
        self._versions: array[int] | None = None
        """Of each of these dicts, see `note_versions`."""
        self._classes = [(each.__module__, each, _content_of(each)) for each in _classes(built)]

    def note_versions(self) -> None:
        """Take the code that the modules have now for the same: of the rest `why_changed` asks.

        A program then has to look at few modules. To look at all means to count references to
        their functions, and so to copy ten thousand pages, which takes 0.04 s.
        """
        if _numbers_changes():
            self._versions = array("Q", map(_version_at, self._dicts))

    def has_other_files(self) -> bool:
        """Tell whether a file of the source is not the same any more."""
        try:
            return files_below(self._folder) != self._files
        except OSError:
            return True

    def why_changed(self, hidden: Container[str] = ()) -> str | None:
        """Return what is not the same any more; None if all is.

        Args:
            hidden: names of modules that have been out of reach since; they are not compared.
        """
        if files_below(self._folder) != self._files:
            return f"a file in {self._folder} has changed"
        if reason := why_other(self._modes):
            return reason
        if _hears_all_warnings():
            return "all warnings are asked for, or taken as errors"
        if variables_now() != self._variables:
            return "a variable has changed"
        if (name := self._tables.changed(hidden)) is not None:
            return f"{name} has other entries"
        for home, module in list(sys.modules.items()):
            if self._homes.get(home, module) is not module:
                return f"the module {home} was replaced"
        for home, owner, code in self._changed():
            if home in hidden:
                continue
            now = vars(owner)
            for name, value in () if code.items() <= now.items() else code.items():
                if _bare(now.get(name)) is not _bare(value):
                    return f"{owner.__name__}.{name} was replaced"
            if added := [n for n in _BUILTINS & now.keys() - code.keys() if callable(now[n])]:
                return f"{owner.__name__}.{min(added)} was added"
        for home, kind, content in self._classes:
            if home not in hidden and (name := _other_name(content, _content_of(kind))):
                return f"{kind.__name__}.{name} was replaced"
        return None

    def _changed(self) -> Iterator[tuple[str, ModuleType, dict[str, object]]]:
        """Yield what is noted of the modules that may have changed."""
        if self._versions is None:
            yield from self._code
            return
        for place, (address, version) in enumerate(zip(self._dicts, self._versions, strict=True)):
            if _version_at(address) != version:
                yield self._code[place]


def _version_at(address: int) -> int:
    """Return the number that a dict got with its last change (PEP 509), by its address."""
    return ctypes.c_uint64.from_address(address + _VERSION_OFFSET).value


def _numbers_changes() -> bool:
    """Tell whether this Python numbers the changes of dicts; those from 3.14 on do not."""
    if sys.implementation.name != "cpython":
        return False
    probe = {"key": 0}
    before = _version_at(id(probe))
    is_kept = _version_at(id(probe)) == before
    probe["key"] = 1
    return is_kept and _version_at(id(probe)) != before


def variables_now() -> dict[str, str]:
    """Return the variables that the libraries and shmload read."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and name not in _OTHER_VARIABLES
    }


def _hears_all_warnings() -> bool:
    """Tell whether a filter shows warnings of a general kind, wherever they come from."""
    return any(
        action != "ignore"
        and (message, module) == (None, None)
        and category.__module__ == "builtins"
        for action, message, category, module, _ in warnings.filters
    )


def _classes(built: list[object]) -> set[type]:
    """Return the classes of what was built, with their bases."""
    parts = [
        part
        for each in built
        for part in (each.modules() if isinstance(each, torch.nn.Module) else (each,))
    ]
    parts += [getattr(part, "config", None) for part in parts]
    return {base for part in parts for base in type(part).__mro__} - {object}


def _bare(value: object) -> object:
    """Return the function in a method, and behind those that `redirect` puts in front."""
    while True:
        function = what_is_behind(getattr(value, "__func__", value))
        if function is value:
            return value
        value = function


def _content_of(kind: type) -> dict[str, object]:
    """Return the functions, classes and constants of a class."""
    return constants(kind) | {name: _bare(value) for name, value in _code_in(kind).items()}


def _other_name(before: dict[str, object], now: dict[str, object]) -> str | None:
    """Return a name that has something else than before; None if none has."""
    names = before.keys() ^ now.keys()
    names |= {name for name in before.keys() & now.keys() if before[name] != now[name]}
    return min(names, default=None)


def _code_in(owner: ModuleType | type) -> dict[str, object]:
    """Return the functions and classes of a module or class; of a module, the modules too."""
    kinds = (FunctionType, type, classmethod, staticmethod, property)
    is_other = _is_code_too if isinstance(owner, ModuleType) else lambda *_: False
    # A lazy package gives these again when it is asked.
    kept = (lazy_names(owner) if isinstance(owner, ModuleType) else None) or ()
    return {
        name: value
        for name, value in list(vars(owner).items())
        # Not isinstance: some objects warn when they are asked for their class.
        if name not in kept
        and not (owner is sys and name.endswith("hook"))  # programs set those
        and (issubclass(type(value), kinds) or is_other(owner.__name__, name, value))
    }


def _is_code_too(home: str, name: str, value: object) -> bool:
    """Tell whether a name in a module leads to code that has no kind of its own in Python."""
    if name.startswith("__"):
        return False
    if issubclass(type(value), ModuleType):
        is_below = sys.modules.get(f"{home}.{name}") is value  # its import sets it
        return not is_below and vars(value).get("__name__") not in _OF_PROGRAMS
    return callable(value)
