"""The interpreter of a copy, made to look as if it had just started with its program."""

import builtins
import functools
import os
import runpy
import sys
from importlib.util import MAGIC_NUMBER
from types import ModuleType
from typing import Any

from shmload._templates.messages import Program
from shmload._templates.stash import Stash

RUN_MODULE: Any = vars(runpy)["_run_module_as_main"]


class NotHere(Exception):
    """The program cannot be run by a copy of this template; str says why."""


def prepare(program: Program, stash: Stash) -> functools.partial[Any]:
    """Set what Python sets when it starts, and return what runs the program.

    Raises:
        NotHere: Python itself has to run it.
        OSError: it cannot be read.
    """
    value = os.fsdecode(program.value)
    arguments = list(map(os.fsdecode, program.arguments))
    # A new one: the garbage collector has been told to leave the template's objects alone.
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    main = vars(module)
    main.update(__annotations__={}, __builtins__=builtins)
    import _frozen_importlib as bootstrap
    import _frozen_importlib_external as external

    run: functools.partial[Any]
    match program.kind:
        case "module":
            sys.argv[:] = ["-m", *arguments]
            orig, first = ["-m", value], os.getcwd()
            is_package = hasattr(stash.hidden.get(value), "__path__")
            # It runs anew from its file; of a package that is another module.
            run_anew = f"{value}.__main__" if is_package else value
            if run_anew in stash and not stash.drop(run_anew):
                raise NotHere(f"the template has imported {run_anew}, and others need it")
            run = functools.partial(RUN_MODULE, value)
        case "code":
            sys.argv[:] = ["-c", *arguments]
            orig, first = ["-c", value], ""
            main["__loader__"] = bootstrap.BuiltinImporter
            run = _runner(value.encode("utf-8", "surrogateescape") + b"\n", "<string>", main)
        case _:
            sys.argv[:] = [value, *arguments]
            orig = [value]
            run, first = _script(value, main, external)
    sys.orig_argv[:] = [sys.executable, *map(os.fsdecode, program.flags), *orig, *arguments]
    _set_path(first, run.func is RUN_MODULE and program.kind == "script", stash)
    return run


def _set_path(first: str, is_program: bool, stash: Stash) -> None:
    """Put the program's directory in front of the path; with -P only if it is the program."""
    if not sys.flags.safe_path or is_program:
        sys.path.insert(0, first)
    if not sys.flags.safe_path:
        name = stash.shadowed_in(sys.path[0])
        if name:
            raise NotHere(f"{sys.path[0] or 'the directory'} has a {name} of its own")


def _script(path: str, main: dict[str, Any], external: Any) -> tuple[functools.partial[Any], str]:
    """Return what runs a file or directory, and its entry of `sys.path`."""
    absolute = os.path.join(os.getcwd(), path)
    if os.path.isdir(path) or _is_archive(path):
        return functools.partial(RUN_MODULE, "__main__", False), absolute
    main["__file__"] = absolute
    main["__cached__"] = None
    main["__loader__"] = external.SourceFileLoader("__main__", absolute)
    with open(path, "rb") as file:
        raw = file.read()
    folder = os.path.dirname(os.path.realpath(path))
    return _runner(raw, absolute, main), folder


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(4)
        if head[:2] == MAGIC_NUMBER[:2] and head[2:] == b"\r\n":
            raise NotHere("it is a compiled file")
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16) - 22))
        return b"PK\x05\x06" in file.read()


def _runner(source: bytes, name: str, main: dict[str, Any]) -> functools.partial[Any]:
    """Return what runs a program: a function of C, so that no frame of ours is below it."""
    arguments = (source, name, "exec", 0, True)
    try:
        return functools.partial(exec, compile(*arguments), main)
    except (SyntaxError, ValueError) as exc:
        raise NotHere("it is no Python program") from exc
