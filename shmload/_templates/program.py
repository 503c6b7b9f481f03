"""A copy of the template becomes a program: it takes over what its caller has, and runs it.

It says that it is ready, and runs the program when the caller says so. What a copy of the template
cannot have as Python would, it refuses.
"""

import contextlib
import faulthandler
import fcntl
import functools
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from importlib.util import MAGIC_NUMBER
from types import ModuleType
from typing import Any

from shmload._templates import ending, messages, variables, wire
from shmload._templates.caller import Doubt, run_plainly, start_for_the_next
from shmload._templates.hidden import Hidden
from shmload._templates.messages import Call, Go, Hello, Program, Ready, Refused
from shmload._templates.renewal import renew_places, renew_seeds, renew_streams

# The caller answers at once; one that does not say anything delays nobody.
_TIMEOUT_S = 5.0
_REDIRECT = "shmload.integrations.redirect"
_RUN_MODULE: Any = vars(runpy)["_run_module_as_main"]


def become(
    channel: wire.Socket, hidden: Hidden, keep: set[int], coerced: dict[str, str]
) -> Callable[[], Any]:
    """Become the program that a caller sends, in a copy of the template; return what runs it.

    Args:
        channel: to the caller.
        hidden: the template's modules.
        keep: descriptors that libraries have opened.
        coerced: variables that Python itself has set when it started.
    """
    channel.settimeout(_TIMEOUT_S)
    try:
        messages.send(channel, Hello())
        found = messages.receive(channel, Call)
        if found is None:
            os._exit(0)
    except (OSError, ValueError):
        os._exit(0)
    call, (directory, *fds) = found
    group = os.getpgrp()
    try:
        os.fchdir(directory)
        channel = _take_descriptors(call.fds, fds, channel, keep)
        return _prepare(call, channel, group, hidden, coerced)
    except Exception as exc:  # whatever it is, the caller can run the program itself
        refused = Refused(f"{type(exc).__name__}: {exc}", 0)
        if isinstance(exc, Doubt):
            refused = Refused(str(exc), int(exc.is_replaceable))
        with contextlib.suppress(OSError):
            messages.send(channel, refused)
        os._exit(0)


def _prepare(
    call: Call, channel: wire.Socket, group: int, hidden: Hidden, coerced: dict[str, str]
) -> Callable[[], Any]:
    environment = variables.variables_in(call.environ)
    os.environ.clear()
    os.environ.update(variables.with_redirect(call.program.redirect, environment) | coerced)
    os.umask(call.umask)
    os.setpgid(0, call.group)
    _take_dispositions(call.ignored)
    renew_streams()
    renew_seeds(hidden.modules)
    renew_places()
    run = _runner_of(call.program, hidden)
    if call.program.redirect and _REDIRECT not in hidden.modules:
        raise Doubt("the template has not imported what --redirect needs")
    try:
        messages.send(channel, Ready(os.getpid(), group))
        if messages.receive(channel, Go) is None:
            os._exit(0)
    except (OSError, ValueError):  # the caller has waited too long, and runs the program itself
        os._exit(0)
    traces = ending.Traces()
    hidden.begin(call.settings, _start_over_of(call, environment, traces, hidden.named))
    if call.program.redirect:
        _redirect(call.program.redirect, hidden)
    vars(threading.main_thread())["_native_id"] = threading.get_native_id()  # else the template's
    ending.die_with(channel, with_group=not call.group)
    ending.begin(traces)
    blocked = {number for number in signal.valid_signals() if call.blocked >> (number - 1) & 1}
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    traces.begin()
    return run


def _start_over_of(
    call: Call, environment: dict[str, str], traces: ending.Traces, named: list[str]
) -> Callable[[str, list[list[str]]], None]:
    """Return what runs a program again in the ordinary way, if that is still possible."""

    def start_over(reason: str, settings: list[list[str]]) -> None:
        can_start_over = traces.is_none()
        if settings != call.settings:  # its next run has a template that has them
            with contextlib.suppress(Exception):
                variables.write_settings(call.program, settings)
                start_for_the_next(call.template, environment, settings, named)
        if can_start_over:
            if call.is_verbose:
                print(f"shmload run: in the ordinary way: {reason}", file=sys.stderr)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            run_plainly(call.program, environment)
        print(f"shmload run: {reason}, but after it had written or read; the libraries do not see "
              "that; run it with python", file=sys.stderr)  # fmt: skip

    return start_over


def _redirect(way: str, hidden: Hidden) -> None:
    """Turn `redirect` on in this process, as an ordinary Python does when it starts.

    Args:
        way: `1` or `verbose`.
        hidden: has the module that does it.
    """
    try:
        redirect: Any = hidden.modules[_REDIRECT]
        redirect.begin(hidden.modules, verbose=way == "verbose")
    except Exception as exc:  # the caller counts on the program by now
        print(f"shmload run: --redirect is off: {exc!r}", file=sys.stderr)


# Signals and descriptors ------------------------------------------------------------------------


def _take_dispositions(ignored: int) -> None:
    """Ignore these signals, a bit each, and give all others what a new Python gives them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = ignored >> (number - 1) & 1
        handler: Any = signal.SIG_IGN if is_ignored else signal.SIG_DFL
        if number == signal.SIGINT and not is_ignored:
            handler = signal.default_int_handler
        try:
            signal.signal(number, handler)
        except (OSError, ValueError):  # signals that the C library keeps
            continue
    if faulthandler.is_enabled():  # its handlers have just been replaced
        faulthandler.disable()
        faulthandler.enable()


def _take_descriptors(
    wanted: list[int], fds: list[int], channel: wire.Socket, keep: set[int]
) -> wire.Socket:
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
    wire.close_others({*moved, own, *keep})
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    taken = wire.take(own)
    taken.settimeout(_TIMEOUT_S)
    return taken


# The program ------------------------------------------------------------------------------------


def _runner_of(program: Program, hidden: Hidden) -> functools.partial[Any]:
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
    if "__mp_main__" in sys.modules:  # the second name that `multiprocessing` gives it
        sys.modules["__mp_main__"] = module
    main = vars(module)
    main.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    match program.kind:
        case "module":
            run, first = _module(value, hidden), os.getcwd()
            sys.argv[:], orig = ["-m", *arguments], ["-m", value]
        case "code":
            main["__loader__"] = sys.modules["_frozen_importlib"].BuiltinImporter
            run = _runner(value.encode("utf-8", "surrogateescape") + b"\n", "<string>", main)
            first = ""
            sys.argv[:], orig = ["-c", *arguments], ["-c", value]
        case _:
            run = _script(value, main)
            first = os.path.dirname(os.path.realpath(value))
            sys.argv[:], orig = [value, *arguments], [value]
    sys.orig_argv[:] = [sys.executable, *map(os.fsdecode, program.flags), *orig, *arguments]
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
    if raw[:2] == MAGIC_NUMBER[:2] and raw[2:4] == b"\r\n":
        raise Doubt("it is a compiled file")
    return _runner(raw, absolute, main)


def _runner(source: bytes, name: str, main: dict[str, Any]) -> functools.partial[Any]:
    """Return what runs a program: a function of C, so that no frame of ours is below it."""
    arguments = (source, name, "exec", 0, True)
    try:
        return functools.partial(exec, compile(*arguments), main)
    except (SyntaxError, ValueError) as exc:  # an archive is no Python program either
        raise Doubt("it is no Python program") from exc
