"""A copy of the template becomes a program: it takes over what its caller has, and runs it.

It says that it is ready, and runs the program when the caller says so. What a copy of the template
cannot have as Python would, it refuses.
"""

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import process
from types import ModuleType
from typing import Any

from shmload._templates import ending, messages, variables
from shmload._templates.caller import Doubt, run_plainly, start_for_the_next, words_of
from shmload._templates.hidden import Hidden
from shmload._templates.identity import FLAGS
from shmload._templates.messages import Call, Program, call_of

# How long to wait for the caller, which answers at once.
_TIMEOUT_S = 5.0
# keyctl(2) by syscall(2)
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1
Birth = tuple[Callable[[], Any], Callable[[], None]]
_RUN_MODULE: Any = vars(runpy)["_run_module_as_main"]


def become(channel: socket.socket, hidden: Hidden, keep: set[int]) -> Birth:
    """Become the program that a caller sends, in a copy of the template.

    Args:
        channel: to the caller.
        hidden: the template's modules.
        keep: descriptors that libraries have opened.

    Returns:
        What runs the program, and what sees to its end.
    """
    channel.settimeout(_TIMEOUT_S)
    try:
        messages.send(channel, messages.HELLO)
        raw, (directory, *fds), *_ = socket.recv_fds(
            channel, messages.MAX_NBYTES, messages.MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )
        call = call_of(raw)
        group = os.getpgrp()
        os.fchdir(directory)
        channel = _take_descriptors(call.fds, fds, channel, keep)
        run = _prepare(call, hidden)
        messages.send(channel, b"ready %d %d" % (os.getpid(), group))
        answer = messages.receive(channel)
    except Exception as exc:  # whatever it is, the caller can run the program itself
        why = str(exc) if isinstance(exc, Doubt) else f"{type(exc).__name__}: {exc}"
        with contextlib.suppress(OSError):
            messages.send(channel, b"refused " + why.encode(errors="replace"))
        os._exit(0)
    if answer != messages.GO:  # the caller has waited too long, and runs the program itself
        os._exit(0)
    traces = ending.Traces()
    hidden.begin(call.settings, _start_over_of(call, traces))
    vars(threading.main_thread())["_native_id"] = threading.get_native_id()  # else the template's
    ending.die_with(channel, with_group=not call.group)
    if select.select([channel], [], [], 0)[0]:  # the caller has gone before that
        os._exit(0)
    channel.detach()  # it stays open: without the template, too, the program ends with its caller
    signal.pthread_sigmask(signal.SIG_SETMASK, _signals_in(call.blocked))
    return run, traces.leave


def _prepare(call: Call, hidden: Hidden) -> Callable[[], Any]:
    """Take over what the caller has; return what runs its program."""
    # Python sets some by itself when it starts: LC_CTYPE in the locale C.
    given = variables.first_environment()
    coerced = {n: value for n, value in os.environ.items() if given.get(n) != value}
    os.environ.clear()
    os.environ.update(call.environment | coerced)
    os.umask(call.umask)
    os.setpgid(0, call.group)
    leave_keyring()
    _take_dispositions(_signals_in(call.ignored))
    _renew_streams()
    _renew_seeds(hidden.modules)
    _renew_places()
    return _runner_of(call.program, hidden)


def _start_over_of(call: Call, traces: ending.Traces) -> Callable[[str, list[list[str]]], None]:
    """Return what runs a program again in the ordinary way, if that is still possible."""
    note = variables.note_of(call.program)  # the program may change its directory

    def start_over(reason: str, settings: list[list[str]]) -> None:
        can_start_over = traces.is_none()
        with contextlib.suppress(Exception):
            if variables.write_settings(note, settings, call.settings):
                start_for_the_next(call.environment, settings)
        if can_start_over:
            if call.is_verbose:
                print(f"shmload run: in the ordinary way: {reason}", file=sys.stderr)
            run_plainly(words_of(call.program), call.environment)
        print(f"shmload run: {reason}, but after it had written or read; the libraries do not see "
              "that; run it with python", file=sys.stderr)  # fmt: skip

    return start_over


# What a new process would have anew -------------------------------------------------------------


def leave_keyring() -> None:
    """Have a new session keyring, so that no process shares the keys of another's session."""
    if keyctl := _KEYCTL.get(os.uname().machine):
        ctypes.CDLL(None).syscall(keyctl, _JOIN_SESSION_KEYRING, None)


def _renew_seeds(modules: Mapping[str, ModuleType]) -> None:
    """Seed what draws random numbers, and draw anew what was drawn at import.

    The module `random` does that by itself in every copy of a process; `os.urandom`, `uuid.uuid4`
    and `secrets` keep nothing. CUDA's generators are made when a program first touches a GPU.

    Args:
        modules: the libraries, by name.
    """
    torch: Any = modules.get("torch")
    numpy: Any = modules.get("numpy.random")
    if torch and hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    if numpy:
        numpy.seed()
    key = process.AuthenticationString(os.urandom(32))  # type: ignore[attr-defined]
    vars(process)["_current_process"]._config["authkey"] = key


def _renew_places() -> None:
    """Forget directories and times of the template."""
    time.tzset()
    tempfile.tempdir = None
    vars(logging)["_startTime"] = time.time()
    with contextlib.suppress(OSError):  # the directory was removed
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def _renew_streams() -> None:
    """Open the standard streams anew, as Python does when it starts.

    They keep their objects, which libraries may hold from their imports on.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        _open_again(fd, name, getattr(sys, name))


def _open_again(fd: int, name: str, stream: Any) -> None:
    """Open a standard stream; see create_stdio in CPython's pylifecycle.c.

    Args:
        fd: its descriptor.
        name: stdin, stdout or stderr.
        stream: the template's, whose encoding is that of the locale, which both share.
    """
    mode = "r" if name == "stdin" else "w"
    is_unbuffered = stream.write_through and mode == "w"
    buffering = 0 if is_unbuffered else -1
    buffer: Any = open(fd, mode + "b", buffering, closefd=False)  # noqa: SIM115 for the whole process
    (buffer if is_unbuffered else buffer.raw).name = f"<{name}>"
    stream.__init__(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=(fd == 2 or os.isatty(fd)) and not is_unbuffered,
        write_through=is_unbuffered,
    )
    stream.mode = mode


# Signals and descriptors ------------------------------------------------------------------------


def _signals_in(mask: int) -> set[int]:
    """Return the signals of a mask, as /proc/PID/status shows it."""
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def _take_dispositions(ignored: set[int]) -> None:
    """Ignore these signals, and give all others what a new Python gives them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler: Any = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if number == signal.SIGINT and number not in ignored:
            handler = signal.default_int_handler
        if signal.getsignal(number) != handler:  # `faulthandler` has some that Python does not see
            signal.signal(number, handler)


def _take_descriptors(
    wanted: list[int], fds: list[int], channel: socket.socket, keep: set[int]
) -> socket.socket:
    """Give each descriptor the number that it has in the caller, and close all others.

    Args:
        wanted: the numbers.
        fds: a descriptor for each number.
        channel: stays open, at a number of its own.
        keep: stay open.

    Returns:
        The channel.

    Raises:
        Doubt: a number of `keep` is wanted: libraries have opened it.
        OSError: there are no descriptors left.
    """
    if keep & set(wanted):
        raise Doubt(f"libraries have opened descriptors {sorted(keep & set(wanted))}")
    above = max([*wanted, *keep, *fds, 63]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    own = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    channel.detach()
    messages.close_others({*moved, own, *keep})
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    taken = socket.socket(fileno=own)
    taken.settimeout(_TIMEOUT_S)
    return taken


# The program ------------------------------------------------------------------------------------


def _runner_of(program: Program, hidden: Hidden) -> functools.partial[Any]:
    """Set what Python sets when it starts, and return what runs the program.

    Raises:
        Doubt: Python itself has to run it.
        OSError: it cannot be read.
    """
    value, arguments = program.value, program.arguments
    # A new one: the garbage collector has been told to leave the template's objects alone.
    module = ModuleType("__main__")
    # The second name is what `multiprocessing` gives it, which is imported above.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    main = vars(module)
    main.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    match program.kind:
        case "module":
            run, first = _module(value, hidden), os.getcwd()
            sys.argv[:], orig = ["-m", *arguments], ["-m", value]
        case "code":
            main["__loader__"] = sys.modules["_frozen_importlib"].BuiltinImporter
            run = _runner(value + "\n", "<string>", main)
            first = ""
            sys.argv[:], orig = ["-c", *arguments], ["-c", value]
        case _:
            run = _script(value, main)
            first = os.path.dirname(os.path.realpath(value))
            sys.argv[:], orig = [value, *arguments], [value]
    sys.orig_argv[:] = [sys.executable, *FLAGS, *orig, *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, first)
        if name := hidden.shadowed_in(first):
            raise Doubt(f"{first or 'the directory'} has a {name} of its own")
    return run


def _module(name: str, hidden: Hidden) -> functools.partial[Any]:
    """Return what runs a module anew from its file; of a package that is another module."""
    found = hidden.modules.get(name) or sys.modules.get(name)
    anew = f"{name}.__main__" if hasattr(found, "__path__") else name
    if anew in hidden.modules or (anew in sys.modules and "." in anew):
        raise Doubt(f"the template has imported {anew}")
    return functools.partial(_RUN_MODULE, name)


def _script(path: str, main: dict[str, Any]) -> functools.partial[Any]:
    absolute = os.path.join(os.getcwd(), path)
    external: Any = sys.modules["_frozen_importlib_external"]
    main["__file__"] = absolute
    main["__cached__"] = None
    main["__loader__"] = external.SourceFileLoader("__main__", absolute)
    with open(path, "rb") as file:
        raw = file.read()
    return _runner(raw, absolute, main)


def _runner(source: str | bytes, name: str, main: dict[str, Any]) -> functools.partial[Any]:
    """Return what runs a program: a function of C, so that no frame of ours is below it."""
    arguments = (source, name, "exec", 0, True)
    try:
        return functools.partial(exec, compile(*arguments), main)
    except (SyntaxError, ValueError) as exc:  # a compiled file, an archive
        raise Doubt("it is no Python program") from exc
