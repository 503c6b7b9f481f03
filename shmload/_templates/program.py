"""The process of a program: from a copy of the template to what its caller asked for.

    template ──fork──▶ spare ──call──▶ ready ──go──▶ the program

A spare waits for a call. It takes over the caller's standing, streams and variables, says that it
is ready, and runs the program when the caller says so. What cannot be taken over, it refuses.
"""

import builtins
import contextlib
import fcntl
import functools
import gc
import io
import os
import runpy
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib.util import MAGIC_NUMBER
from types import ModuleType
from typing import Any

from shmload._templates import wire
from shmload._templates.place import remember
from shmload._templates.plain import command_of
from shmload._templates.recorder import change_state, differences, read_state
from shmload._templates.standing import (
    CannotTake,
    take_dispositions,
    take_mask,
    take_standing,
)
from shmload._templates.stash import Stash, Traces

_RUN_MODULE: Any = vars(runpy)["_run_module_as_main"]
# F_SETSIG is not in the module fcntl.
_F_SETSIG = 10


class Spare:
    """A copy of the template that waits for its call.

    Args:
        stash: of the template's imports; hidden when the call comes.
        fresh: the state that imports change, as it was before any.
        coerced: variables that Python itself has set when it started.
        keep: descriptors of the template that libraries have opened.
    """

    def __init__(
        self,
        stash: Stash,
        fresh: dict[str, list[Any]],
        coerced: dict[str, str],
        keep: set[int],
    ) -> None:
        self._stash = stash
        self._fresh = fresh
        self._coerced = coerced
        self._keep = keep
        self._group = os.getpgrp()
        self._caller: socket.socket

    def wait(self, orders: socket.socket) -> Callable[[], Any]:
        """Wait for a call, become its program, and return what runs it.

        Args:
            orders: brings the call, and the caller's socket, which brings the descriptors.
        """
        self._had = frozenset(sys.modules)
        for change in differences(read_state(), self._fresh):
            if change[0] != "environ":
                change_state(*change)
        self._stash.hide()
        found = wire.receive(orders)
        if found is None:
            os._exit(0)
        call, (caller,) = found
        self._caller = socket.socket(fileno=caller)
        self._caller.settimeout(None)
        try:
            wire.send(self._caller, {"send": 1})
            sent = wire.receive(self._caller)
            if sent is None:
                os._exit(0)  # the caller has waited too long, and runs the program itself
            return self._become(call, sent[1])
        except Exception as exc:  # whatever it is, the caller can run the program itself
            reason = str(exc) if isinstance(exc, Refused) else f"{type(exc).__name__}: {exc}"
            with contextlib.suppress(OSError):
                wire.send(self._caller, {"refused": reason})
            os._exit(0)

    def _become(self, call: dict[str, Any], fds: list[int]) -> Callable[[], Any]:
        try:
            self._caller = _take_descriptors(call["fds"], fds, self._caller, self._keep)
            os.environ.clear()
            for name, value in call["environ"]:
                os.environb[wire.as_bytes(name)] = wire.as_bytes(value)
            for name, value in self._coerced.items():
                os.environ[name] = value
            if call["group"]:
                os.setpgid(0, call["group"])
            else:
                os.setpgid(0, 0)
            take_standing(call["standing"])
            take_dispositions(call["standing"]["ignored"])
        except (CannotTake, OSError) as exc:
            raise Refused(str(exc)) from exc
        traces = Traces()

        def start_over(reason: str) -> None:
            if traces.is_none():
                _execute_plainly(call)
            print(f"shmload run: {reason}, but after it had written or read; the libraries do not "
                  "see that; run it with python", file=sys.stderr)  # fmt: skip

        self._stash.when_too_late(start_over)
        run = _prepare(call, self._stash)
        self._announce()
        self._stash.begin()
        if run.func is _RUN_MODULE:
            __import__("runpy")  # Python too has it then, and what it needs
        _die_with(self._caller)
        global _channel, _had, _program
        _channel, _had = self._caller, self._had
        _program = (os.getpid(), os.fstat(self._caller.fileno()).st_ino)
        gc.enable()
        take_mask(call["standing"]["blocked"])
        return run

    def _announce(self) -> None:
        """Tell the caller that the program can run; return when it shall."""
        try:
            wire.send(self._caller, {"ready": os.getpid(), "group": self._group})
            answer = wire.receive(self._caller)
        except OSError:
            answer = None
        if answer is None:
            os._exit(0)  # the caller has waited too long, and runs the program itself


class Refused(Exception):
    """This program cannot run here; str says why."""


_channel: socket.socket | None = None
_program: tuple[int, int] = (0, 0)
"""The program's process, and the inode of the channel; its descriptor may be another's by then."""
_had: frozenset[str] = frozenset()
"""Modules of the template."""


def leave() -> None:
    """Tell the caller how the program ends, as far as that is known before it does."""
    exc = sys.exc_info()[1]
    code = 0 if exc is None else 1
    if isinstance(exc, SystemExit):
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    with contextlib.suppress(Exception):  # the program may have closed or replaced anything
        if _channel and _program == (os.getpid(), os.fstat(_channel.fileno()).st_ino):
            _live_without(_channel)
            wire.send(_channel, {"code": code & 0xFF})
            remember(_new_modules())


def _new_modules() -> list[str]:
    """Return the modules of packages that the program has imported and its template has not."""
    folders = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("purelib", "platlib"))
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in _had and (getattr(module, "__file__", None) or "").startswith(folders)
    ]


def _take_descriptors(
    wanted: list[int], fds: list[int], channel: socket.socket, keep: set[int]
) -> socket.socket:
    """Give each descriptor the number that it has in the caller, and close all others.

    The first one is the caller's directory. Returns the channel, at a number of its own.
    """
    directory, *fds = fds
    os.fchdir(directory)
    os.close(directory)
    if keep & set(wanted):
        raise Refused(f"libraries have opened descriptors {sorted(keep & set(wanted))}")
    above = max([*wanted, *keep, *fds, 63]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    own = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    channel.detach()
    staying = sorted({*moved, own, *keep})
    for low, high in zip([-1, *staying], [*staying, 1 << 20], strict=True):
        os.closerange(low + 1, high)
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    return socket.socket(fileno=own)


def _die_with(channel: socket.socket) -> None:
    """Have the kernel kill this process when the caller's end of the socket closes."""
    fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(channel, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _live_without(channel: socket.socket) -> None:
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags & ~os.O_ASYNC)


def _prepare(call: dict[str, Any], stash: Stash) -> functools.partial[Any]:
    """Make this interpreter look as if it had just started; return what runs the program."""
    kind, value = call["kind"], os.fsdecode(wire.as_bytes(call["value"]))
    arguments = [os.fsdecode(wire.as_bytes(text)) for text in call["arguments"]]
    _renew_streams()
    _renew_libraries(stash.hidden)
    # A new one: the garbage collector has been told to leave the template's objects alone.
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    main = vars(module)
    main.update(__annotations__={}, __builtins__=builtins)
    import _frozen_importlib as bootstrap
    import _frozen_importlib_external as external

    flags = [os.fsdecode(wire.as_bytes(text)) for text in call["flags"]]
    run: functools.partial[Any]
    match kind:
        case "module":
            sys.argv[:] = ["-m", *arguments]
            orig, first = ["-m", value], os.getcwd()
            if value in stash.hidden or f"{value}.__main__" in stash.hidden:
                raise Refused(f"the template has imported {value} itself")
            run = functools.partial(_RUN_MODULE, value)
        case "code":
            sys.argv[:] = ["-c", *arguments]
            orig, first = ["-c", value], ""
            main["__loader__"] = bootstrap.BuiltinImporter
            run = _runner(value.encode("utf-8", "surrogateescape") + b"\n", "<string>", main)
        case _:
            sys.argv[:] = [value, *arguments]
            orig = [value]
            run, first = _script(value, main, external)
    sys.orig_argv[:] = [sys.executable, *flags, *orig, *arguments]
    if not sys.flags.safe_path or first == value:
        sys.path.insert(0, first)
    for folder in sys.path[:1]:
        if not sys.flags.safe_path:
            name = stash.shadowed_in(folder)
            if name:
                raise Refused(f"{folder or 'the directory'} has a {name} of its own")
    return run


def _script(path: str, main: dict[str, Any], external: Any) -> tuple[functools.partial[Any], str]:
    """Return what runs a file or directory, and its entry of `sys.path`."""
    if os.path.isdir(path) or _is_archive(path):
        return functools.partial(_RUN_MODULE, "__main__", False), path
    absolute = os.path.join(os.getcwd(), path.removeprefix("./"))
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
            raise Refused("it is a compiled file")
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16) - 22))
        return b"PK\x05\x06" in file.read()


def _runner(source: bytes, name: str, main: dict[str, Any]) -> functools.partial[Any]:
    """Return what runs a program: a function of C, so that no frame of ours is below it."""
    arguments = (source, name, "exec", 0, True)
    try:
        return functools.partial(exec, compile(*arguments), main)
    except (SyntaxError, ValueError) as exc:
        raise Refused("it is no Python program") from exc


def _renew_streams() -> None:
    """Open the standard streams anew, as Python does when it starts.

    Standard error keeps its object, since libraries hold it from their imports on.
    """
    for fd, name in enumerate(("stdin", "stdout")):
        stream = _open_stream(fd, name, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _open_stream(fd: int, name: str, before: Any) -> io.TextIOWrapper:
    """Return a standard stream; see create_stdio in CPython's pylifecycle.c.

    Args:
        fd: its descriptor.
        name: stdin or stdout.
        before: the template's, whose encoding is that of the locale, which both share.
    """
    mode = "r" if name == "stdin" else "w"
    is_unbuffered = before.write_through and mode == "w"
    buffering = 0 if is_unbuffered else -1
    buffer: Any = open(fd, mode + "b", buffering, closefd=False)  # noqa: SIM115 for the whole process
    (buffer if is_unbuffered else buffer.raw).name = f"<{name}>"
    stream = io.TextIOWrapper(
        buffer,
        encoding=before.encoding,
        errors=before.errors,
        newline="\n",
        line_buffering=os.isatty(fd) and not is_unbuffered,
        write_through=is_unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def _renew_libraries(hidden: Mapping[str, Any]) -> None:
    """Undo what modules have kept since they were imported: directories, seeds, times."""
    import time

    modules = {**hidden, **sys.modules}
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None
    if "linecache" in modules:
        modules["linecache"].clearcache()
    if "logging" in modules:
        modules["logging"]._startTime = time.time()
    process = modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()
        process._current_process._config["authkey"] = process.AuthenticationString(os.urandom(32))
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()


def _execute_plainly(call: dict[str, Any]) -> None:
    """Replace this process by an ordinary Python that runs the program."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    environment = {wire.as_bytes(name): wire.as_bytes(value) for name, value in call["environ"]}
    os.execve(sys.executable, command_of(call), environment)
