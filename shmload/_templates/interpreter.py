"""The interpreter of a copy, made to look as if it had just started with its program."""

import builtins
import contextlib
import ctypes
import functools
import os
import runpy
import sys
import time
import uuid
from collections.abc import Sequence
from importlib.util import MAGIC_NUMBER
from types import ModuleType
from typing import Any

from shmload._templates.caller import Doubt
from shmload._templates.messages import Program
from shmload._templates.stash import Stash

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
_ID_DIGITS = 32
RUN_MODULE: Any = vars(runpy)["_run_module_as_main"]


def prepare(program: Program, stash: Stash) -> functools.partial[Any]:
    """Set what Python sets when it starts, and return what runs the program.

    Raises:
        Doubt: Python itself has to run it.
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
                raise Doubt(f"the template has imported {run_anew}, and others need it")
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
            raise Doubt(f"{sys.path[0] or 'the directory'} has a {name} of its own")


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
            raise Doubt("it is a compiled file")
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16) - 22))
        return b"PK\x05\x06" in file.read()


def _runner(source: bytes, name: str, main: dict[str, Any]) -> functools.partial[Any]:
    """Return what runs a program: a function of C, so that no frame of ours is below it."""
    arguments = (source, name, "exec", 0, True)
    try:
        return functools.partial(exec, compile(*arguments), main)
    except (SyntaxError, ValueError) as exc:
        raise Doubt("it is no Python program") from exc


# What modules keep --------------------------------------------------------------------------------


class Renewal:
    """What modules have kept since their import and would not be the same in a new process.

    It finds the modules, so make it before they are hidden.
    """

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._numpy: Any = sys.modules.get("numpy.random")
        self._process: Any = sys.modules.get("multiprocessing.process")
        self._tempfile: Any = sys.modules.get("tempfile")
        self._linecache: Any = sys.modules.get("linecache")
        self._logging: Any = sys.modules.get("logging")
        # Libraries that talk to a hub tell their processes apart by such a number.
        self._sessions = [
            module
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            and isinstance(found := vars(module).get("SESSION_ID"), str)
            and len(found) == _ID_DIGITS
        ]

    def renew_seeds(self) -> None:
        """Seed what draws random numbers, and draw anew what was drawn at import.

        The module `random` does that by itself in every copy of a process; `os.urandom`,
        `uuid.uuid4` and `secrets` keep nothing. CUDA's generators are made when a program first
        touches a GPU.
        """
        if hasattr(self._torch, "default_generator"):
            self._torch.default_generator.seed()
        if self._numpy:
            self._numpy.seed()
        if self._process:
            key = self._process.AuthenticationString(os.urandom(32))
            self._process._current_process._config["authkey"] = key
        for module in self._sessions:
            module.SESSION_ID = uuid.uuid4().hex  # type: ignore[attr-defined]

    def renew_places(self) -> None:
        """Forget directories, files and times of the template."""
        _renew_time_zone()
        if self._tempfile:
            self._tempfile.tempdir = None
        if self._linecache:
            self._linecache.clearcache()
        if self._logging:
            self._logging._startTime = time.time()
        if self._process:
            with contextlib.suppress(OSError):  # the directory was removed
                self._process.ORIGINAL_DIR = os.getcwd()


def _renew_time_zone() -> None:
    """Read the time zone anew: its file may have changed on disk."""
    zone = os.environ.get("TZ")
    if zone:  # the C library reads it again only for another name
        os.putenv("TZ", "UTC0")
        time.tzset()
        os.putenv("TZ", zone)
    time.tzset()


# What ps and /proc show ---------------------------------------------------------------------------


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


# Where they are in /proc/self/stat, counted after the command's name.
_FIELDS = {"start_code": 23, "end_code": 24, "start_stack": 25, "start_data": 42, "end_data": 43,
           "start_brk": 44}  # fmt: skip


def show(command: Sequence[bytes], environ: bytes) -> None:
    """Have the kernel show a command line and variables as this process's.

    They lie in the process's memory, where the kernel was told when it was started. It can be told
    of another place (prctl(2), PR_SET_MM_MAP); a kernel that refuses shows those of the template.

    Args:
        command: the words of the command line.
        environ: the variables, as /proc/PID/environ has them.
    """
    arguments = b"".join(word + b"\0" for word in command)
    memory = ctypes.create_string_buffer(arguments + environ)
    start = ctypes.addressof(memory)
    with open("/proc/self/stat", "rb", buffering=0) as file:
        fields = file.read().rpartition(b")")[2].split()
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_uint64
    shown = _Map(**{name: int(fields[at]) for name, at in _FIELDS.items()})
    shown.brk = libc.sbrk(0)
    shown.arg_start, shown.arg_end = start, start + len(arguments)
    shown.env_start, shown.env_end = shown.arg_end, shown.arg_end + len(environ)
    shown.exe_fd = _NO_FILE
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # the kernel reads it from now on
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0)
