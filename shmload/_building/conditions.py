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
import os
import sys
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

import msgspec
import torch

from shmload._building.libraries import what_is_behind
from shmload._building.parts import modules
from shmload._building.state import constants, modes, registered, why_other
from shmload._host.fingerprint import Stamp, fingerprint

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
# Methods that may be missing: transformers gives torch's modules the first at its first build, and
# `redirect` puts the second into classes.
_NOT_NAMED = frozenset({"smart_apply", "from_pretrained"})
_MAX_TEXT = 500
_MAX_ENTRIES = 500


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What must be as it was when models were built the first time."""

    stamps: dict[str, Stamp]
    """By the path of a file of code: its fingerprint."""
    values: dict[str, dict[str, int]]
    """By module, and name in it, with points: digests of the functions that ran, and of the values
    that they have read there."""
    classes: dict[str, dict[str, int]]
    """The same of classes: digests of the names of their methods, bases and constants."""
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


def conditions_of(trace: Trace, named: Iterable[Any]) -> Conditions:
    """Return what a traced build depends on.

    Args:
        trace: of the build.
        named: the classes and functions that what was built consists of.
    """
    values, classes = (collections.defaultdict[str, dict[str, int]](dict) for _ in range(2))
    owners = {each for each in named if isinstance(each, type)}
    for function in {*named} - owners:
        values[function.__module__][function.__qualname__] = _digest(function)
    for home, module in modules():
        package = home.partition(".")[0]
        if package in SKIPPED:
            continue
        for name, function, owner in _functions(module):
            codes = list(_codes(function))
            # A wrapper's own code is that of all that it wraps.
            if not codes or codes[-1] not in trace.codes:
                continue
            values[home][name] = _digest(function)
            owners |= {owner} if owner else set()
            if package not in _MODELLING or home.endswith(_OF_MESSAGES):
                continue
            for chain in frozenset[str]().union(*map(_globals_read, trace.codes & {*codes})):
                found = _follow(vars(module), chain)
                if found is not _MISSING:
                    values[home][chain] = _digest(found)
    for owner in {base for kind in owners for base in kind.__mro__}:
        if owner.__module__.partition(".")[0] in _LIBRARIES and _find(owner) is owner:
            classes[owner.__module__][owner.__qualname__] = _digest_class(owner)
    homes = (each for each in {*values, *classes} if each.partition(".")[0] in _LIBRARIES)
    files = (getattr(sys.modules[home], "__file__", None) for home in homes)
    return Conditions(
        stamps={file: stamp for file in files if file and (stamp := _stamp(file))},
        values=dict(values),
        classes=dict(classes),
        environment={
            name: os.environ.get(name) for name in sorted(trace.variables - _OTHER_VARIABLES)
        },
        modes=modes(),
    )


def why_unmet(conditions: Conditions) -> str | None:
    """Return what is not as it was; None if all is. Imports nothing.

    What is patched is looked for in imported modules alone; files are compared in any case.
    """
    if reason := why_other(conditions.modes):
        return reason
    for name, value in conditions.environment.items():
        if os.environ.get(name) != value:
            return f"the variable {name} has another value"
    if file := changed_file(conditions):
        return f"{file} has changed"
    for _, home, name in _unmet(conditions):
        return f"{home}.{name} is another"
    return None


def without_unmet(conditions: Conditions) -> Conditions:
    """Leave out what is not so in this process, which has built nothing: building changes it."""
    kept = copy.deepcopy(conditions)
    for table, home, name in _unmet(conditions):
        del getattr(kept, table)[home][name]
    return kept


def changed_file(conditions: Conditions) -> str | None:
    """Return a file whose code ran and that was edited since; None if there is none."""
    return next((f for f, stamp in conditions.stamps.items() if _stamp(f) != stamp), None)


def _unmet(conditions: Conditions) -> Iterator[tuple[str, str, str]]:
    """Yield table, module and name of what is not as it was."""
    for table, digest in (("values", _digest), ("classes", _digest_class)):
        for home, digests in getattr(conditions, table).items():
            module = sys.modules.get(home)
            if module is None:
                continue
            for name, wanted in digests.items():
                found = _follow(vars(module), name)
                # Some modules of the libraries fetch a name when it is first used.
                if found is not _MISSING and digest(found) != wanted:
                    yield table, home, name


def _stamp(file: str) -> Stamp | None:
    found = fingerprint(file)
    return found.lasting if found else None


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
            case types.FunctionType():
                behind = what_is_behind(function)
                if behind is not function:
                    function = behind
                    continue
                yield function.__code__
                function = getattr(function, "__wrapped__", None)
            case property():
                for each in (function.fget, function.fset, function.fdel):
                    yield from _codes(each)
                return
            case functools.cached_property():
                function = function.func
            case classmethod() | staticmethod():
                function = function.__func__
            case None:
                return
            case _:
                function = getattr(function, "__wrapped__", None)


def _digest(value: Any) -> int:
    """Digest a plain value; of a function, where its code is, and its plain defaults.

    Of other things, their class and what they are called.
    """
    # Not isinstance: some objects warn when they are asked for their class.
    if not issubclass(type(value), _METHODS):
        return zlib.crc32(_describe(value).encode())
    defaults = getattr(value, "__defaults__", None) or ()
    found = zlib.crc32(repr([each for each in defaults if isinstance(each, _PLAIN)]).encode())
    for code in _codes(value):
        # The content of its file is known by the fingerprint.
        place = f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"
        found = zlib.crc32(place.encode(), found)
    return found


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
    held = [name for name in held if name not in _NOT_NAMED and "_cache" not in name]
    held += [f"{name}={_describe(value)}" for name, value in constants(kind).items()]
    bases = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    loader = _digest(getattr(getattr(kind, "from_pretrained", None), "__func__", None))
    return zlib.crc32(repr((sorted(held), bases, loader)).encode())


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
        return f"{kind}({sorted((str(key), _digest(each)) for key, each in table.items())})"
    return kind
