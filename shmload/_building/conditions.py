"""Conditions: what the constructors of some models used, and must find unchanged.

A build is traced once: which functions ran, which globals they read, which variables of the
environment. A later process that finds other code or other values there builds in the ordinary way.
"""

import collections
import copy
import dis
import enum
import functools
import gc
import importlib
import os
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import msgspec
import torch

from shmload._building.effects import hears_details
from shmload._building.libraries import what_is_behind
from shmload._building.parts import modules
from shmload._building.state import constants, modes, other_mode, registered
from shmload._host.fingerprint import Fingerprint, Stamp

_Code = types.CodeType
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, enum.Enum)
_METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
# That of torch.FloatTensor and its like, which repeat the 740 names of torch.Tensor.
_TENSOR_TYPE = type(torch.FloatTensor)
# What shmload does itself, and what every process has otherwise.
SKIPPED = frozenset({"__main__", "__mp_main__", "shmload", "_pytest", "pytest", "tqdm"})
_MODELLING = frozenset({"accelerate", "diffusers", "torch", "transformers"})
_LIBRARIES = _MODELLING | {"huggingface_hub"}
# Variables that shmload sets itself while it builds, and those that only bars read.
_OTHER_VARIABLES = frozenset({"COLUMNS", "HF_DEACTIVATE_ASYNC_LOAD", "LINES"})
# What is said, and how, is compared otherwise.
_OF_MESSAGES = (".utils.logging", ".utils.tqdm", ".hub_utils", ".utils.hub")
# Methods that may be missing: transformers gives torch's modules the first at its first build; the
# unpickler looks at the second.
_NOT_COMPARED = frozenset({"smart_apply", "from_pretrained"})
_MAX_TEXT = 500
_MAX_ENTRIES = 500


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What must be as it was when models were built the first time."""

    stamps: dict[str, Stamp]
    """By module whose code ran: the fingerprint of its file."""
    digests: dict[str, dict[str, dict[str, int]]]
    """By kind, module, and name in it, with points. Of functions: of their code; of classes: of the
    names of their methods, bases and constants; of values: of what the code that ran found."""
    environment: dict[str, str | None]
    """Variables that were read; None for one that was not set."""
    modes: dict[str, str]
    """Modes and settings, by name."""


class Trace:
    """Notes which code runs; a context for one thread.

    The collector rests: what it would end runs code of its own, which is no code of the build.
    """

    def __init__(self) -> None:
        self.codes: set[_Code] = set()
        self.variables: set[str] = set()
        self._importing = 0
        self._read = os._Environ.__getitem__.__code__

    def __enter__(self) -> Self:
        self._collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            self._importing += 1 if event == "call" else -1
        if event != "call" or self._importing:  # what an import runs is known by its files
            return
        self.codes.add(code)
        if code is self._read:
            self.variables.add(str(frame.f_locals.get("key")))


def conditions_of(trace: Trace, kinds: Iterable[type]) -> Conditions:
    """Return what a traced build depends on.

    Args:
        trace: of the build.
        kinds: the classes of what was built.
    """
    digests = {kind: collections.defaultdict[str, dict[str, int]](dict) for kind in _DIGESTS}
    ran = list[tuple[types.ModuleType, _Code]]()
    owners = set(kinds)
    for home, module in modules():
        if home.partition(".")[0] in SKIPPED:
            continue
        for name, function, owner in _functions(module):
            codes = list(_codes(function))
            # A wrapper's own code is that of all that it wraps.
            if codes and codes[-1] in trace.codes:
                digests["functions"][home][name] = digest_function(function)
                ran += [(module, code) for code in codes if code in trace.codes]
                owners |= {owner} if owner else set()
    for owner in {base for kind in owners for base in kind.__mro__}:
        if owner.__module__.partition(".")[0] in _LIBRARIES and _find(owner) is owner:
            digests["classes"][owner.__module__][owner.__qualname__] = _digest_class(owner)
    for module, code in ran:
        home = module.__name__
        if home.partition(".")[0] in _MODELLING and not home.endswith(_OF_MESSAGES):
            for chain in _globals_read(code):
                found = _follow(vars(module), chain)
                if found is not _MISSING:
                    digests["values"][home][chain] = _digest_value(found)
    homes = {*digests["functions"], *digests["classes"]}
    return Conditions(
        stamps={home: stamp for home in sorted(homes) if (stamp := stamp_of(home))},
        digests={kind: dict(found) for kind, found in digests.items()},
        environment={
            name: os.environ.get(name) for name in sorted(trace.variables - _OTHER_VARIABLES)
        },
        modes=modes(),
    )


def why_unmet(conditions: Conditions) -> str | None:
    """Return what is not as it was; None if all is. Imports nothing.

    A module that this process has not imported has been changed by nobody.
    """
    if hears_details():
        return "the libraries are asked to log more than warnings"
    if (name := other_mode(conditions.modes)) is not None:
        return f"{name}: it is another"
    for name, value in conditions.environment.items():
        if os.environ.get(name) != value:
            return f"the variable {name} has another value"
    for home, stamp in conditions.stamps.items():
        if home in sys.modules and stamp_of(home) != stamp:
            return f"the file of {home} has changed"
    for kind, home, name in _unmet(conditions):
        return f"{home}.{name} {_DIFFERENCES[kind]}"
    return None


def without_unmet(conditions: Conditions) -> Conditions:
    """Leave out what is not so in this process, which has built nothing: building changes it."""
    kept = copy.deepcopy(conditions.digests)
    for kind, home, name in _unmet(conditions):
        del kept[kind][home][name]
    return msgspec.structs.replace(conditions, digests=kept)


def _unmet(conditions: Conditions) -> Iterator[tuple[str, str, str]]:
    """Yield kind, module and name of what is not as it was."""
    for kind, digest in _DIGESTS.items():
        for home, digests in conditions.digests[kind].items():
            module = sys.modules.get(home)
            if module is None:
                continue
            held = vars(module)
            for name, wanted in digests.items():
                found = _follow(held, name)
                # Some modules of the libraries fetch a name when it is first used.
                if found is not _MISSING and digest(found) != wanted:
                    yield kind, home, name


def is_changed_on_disk(conditions: Conditions) -> bool:
    """Tell whether a file of the code that ran was edited, so that nothing is known any more."""
    return any(
        home in sys.modules and stamp_of(home) != stamp for home, stamp in conditions.stamps.items()
    )


def stamp_of(home: str) -> Stamp | None:
    """Return the fingerprint of a library's Python module; None for others."""
    if home.partition(".")[0] not in _LIBRARIES:
        return None
    try:
        return _stat(getattr(sys.modules.get(home), "__file__", None) or _path_of(home))
    except OSError:
        return None


@functools.cache
def _stat(path: str) -> Stamp:
    return Fingerprint.of(os.stat(path)).lasting


def _path_of(home: str) -> str:
    try:
        return importlib.import_module(home).__file__ or ""
    except ImportError:
        return ""


# Functions ----------------------------------------------------------------------------------------


def _functions(module: types.ModuleType) -> Iterator[tuple[str, Any, type | None]]:
    """Yield name, function and class of what a module defines."""
    home = module.__name__
    for name, found in list(vars(module).items()):
        # Not isinstance: some names warn when they are asked for their class.
        if issubclass(type(found), type):
            if found.__module__ == home and type(found) is not _TENSOR_TYPE:
                yield from _methods(found, name)
        elif type(found) is types.FunctionType and (
            found.__module__ == home or hasattr(found, "__wrapped__")
        ):
            yield name, found, None


def _methods(kind: type, name: str) -> Iterator[tuple[str, Any, type | None]]:
    for key, method in list(vars(kind).items()):
        if isinstance(method, _METHODS):
            yield f"{name}.{key}", method, kind
        elif isinstance(method, type) and method.__qualname__.startswith(f"{kind.__qualname__}."):
            yield from _methods(method, f"{name}.{key}")


def _codes(function: Any) -> Iterator[_Code]:
    """Yield the code of a function and of all that it wraps."""
    for _ in range(20):
        match function:
            case property():
                for each in (function.fget, function.fset, function.fdel):
                    yield from _codes(each)
                return
            case functools.cached_property():
                function = function.func
            case classmethod() | staticmethod():
                function = function.__func__
            case types.FunctionType():
                behind = what_is_behind(function)
                if behind is not function:
                    function = behind
                    continue
                yield function.__code__
                function = getattr(function, "__wrapped__", None)
            case None:
                return
            case _:
                function = getattr(function, "__wrapped__", None)


def digest_function(function: Any) -> int:
    """Digest the code of a function, of what it wraps, and its plain defaults."""
    code = getattr(function, "__code__", None)
    if (  # most of them
        code is not None
        and not hasattr(function, "__wrapped__")
        and what_is_behind(function) is function
    ):
        return _digest_code(code) ^ _digest_plain(function.__defaults__)
    found = 0
    for each in _codes(function):
        found = zlib.crc32(_digest_code(each).to_bytes(8), found)
    return found


def _digest_code(code: _Code) -> int:
    # Where it was written: its file is known by its time of change.
    return zlib.crc32(f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}".encode())


def _digest_plain(values: object) -> int:
    if not isinstance(values, tuple):
        return 0
    plain = [each for each in values if isinstance(each, _PLAIN)]
    return zlib.crc32(repr(plain).encode()) if plain else 0


# Classes ------------------------------------------------------------------------------------------


def _find(kind: type) -> object:
    try:
        return _follow(vars(sys.modules[kind.__module__]), kind.__qualname__)
    except KeyError:
        return None


def _digest_class(kind: Any) -> int:
    if not isinstance(kind, type):
        return -1
    held = [name for name, value in vars(kind).items() if isinstance(value, _METHODS)]
    held = [name for name in held if name not in _NOT_COMPARED and "_cache" not in name]
    held += [f"{name}={_describe(value)}" for name, value in constants(kind).items()]
    bases = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return zlib.crc32(repr((sorted(held), bases)).encode())


# Globals ------------------------------------------------------------------------------------------


@functools.cache
def _globals_read(code: _Code) -> frozenset[str]:
    """Return the globals that code reads, each with the attributes that it follows."""
    found: set[str] = set()
    chain: list[str] = []
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            found |= {".".join(chain)} if chain else set()
            chain = [str(each.argval)]
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(each.argval))
        elif each.opname not in ("CACHE", "PRECALL", "PUSH_NULL") and chain:
            found.add(".".join(chain))
            chain = []
    for inner in code.co_consts:
        if isinstance(inner, _Code):  # comprehensions and inner functions
            found |= _globals_read(inner)
    return frozenset(found)


_MISSING = object()


def _follow(held: Any, chain: str) -> Any:
    """Return what a name with points leads to: through modules and classes, and no further.

    Returns:
        `_MISSING` if there is no such name.
    """
    first, _, rest = chain.partition(".")
    found = held.get(first, _MISSING)
    for name in rest.split(".") if rest else ():
        if isinstance(found, type):
            for base in found.__mro__:
                if name in vars(base):
                    found = vars(base)[name]
                    break
            else:
                return _MISSING
        elif isinstance(found, types.ModuleType):
            found = vars(found).get(name, _MISSING)
        else:
            return found
    return found


def _digest_value(value: Any) -> int:
    """Digest a plain value; of other things, what they are and where they come from."""
    if isinstance(value, types.FunctionType):
        return digest_function(value)
    return zlib.crc32(_describe(value).encode())


def _describe(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)[:_MAX_TEXT]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, (tuple, list)) and len(value) < 50:
        return f"{type(value).__name__}({','.join(map(_describe, value))})"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if (table := registered(value)) is not None and len(table) < _MAX_ENTRIES:
        return f"{kind}({sorted((str(key), _digest_value(each)) for key, each in table.items())})"
    return kind


_DIGESTS: dict[str, Callable[[Any], int]] = {
    "functions": digest_function,
    "classes": _digest_class,
    "values": _digest_value,
}
_DIFFERENCES = {
    "functions": "is another function",
    "classes": "is another class",
    "values": "has another value",
}
