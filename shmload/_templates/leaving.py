"""The end of a program: what it tells its caller, and what it leaves undone."""

import contextlib
import ctypes
import fcntl
import os
import signal
import sys

from shmload._templates import messages, wire
from shmload._templates.events import Events
from shmload._templates.messages import Leaves

# F_SETSIG is not in the module fcntl.
_F_SETSIG = 10
# What measures a program often writes its report at the very end.
_MEASURED = {"LD_PRELOAD", "PYTHONDUMPREFS", "PYTHONINSPECT", "PYTHONMALLOCSTATS"}

_channel: wire.Socket | None = None
_program: tuple[int, int] = (0, 0)
"""The program's process, and the inode of the channel; its descriptor may be another's by then."""
_events: Events | None = None


def end_without_destructors() -> None:
    """Have copies of this process end without the destructors of the libraries in it.

    The kernel takes their memory anyway; libtorch's take 0.2 s. What a program itself registers
    with the C library comes first, and streams of C are flushed.
    """
    if "LD_PRELOAD" in os.environ:
        return
    libc = ctypes.CDLL(None)
    for name in ("_exit", "fcloseall"):  # the last one is called first; both know their argument
        libc.on_exit(ctypes.cast(getattr(libc, name), ctypes.c_void_p), None)


def die_with(channel: wire.Socket, *, with_group: bool) -> None:
    """Have the kernel kill this process when the caller's end of the socket closes.

    Args:
        channel: the socket.
        with_group: kill all processes of this one's group too.
    """
    fcntl.fcntl(channel, fcntl.F_SETOWN, -os.getpgrp() if with_group else os.getpid())
    fcntl.fcntl(channel, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC)


def live_without(channel: wire.Socket) -> None:
    """Undo `die_with`, in any process that has the socket."""
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags & ~os.O_ASYNC)


def begin(channel: wire.Socket, events: Events) -> None:
    """Note that this process is a program from now on.

    Args:
        channel: to its caller.
        events: watches this process.
    """
    global _channel, _program, _events
    _channel, _events = channel, events
    _program = (os.getpid(), os.fstat(channel.fileno()).st_ino)


def leave() -> None:
    """Tell the caller how the program ends, as far as that is known before it does."""
    exc = sys.exc_info()[1]
    code = 0 if exc is None else 1
    if isinstance(exc, SystemExit):
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    is_plain = not isinstance(exc, KeyboardInterrupt) and abs(code) < 1 << 31
    with contextlib.suppress(Exception):  # the program may have closed or replaced anything
        if _channel and _program == (os.getpid(), os.fstat(_channel.fileno()).st_ino):
            live_without(_channel)
            messages.send(_channel, Leaves(code & 0xFF))
            # Python ends with SIGINT after KeyboardInterrupt, and asks for commands if told so.
            if _events and is_plain and not _MEASURED & os.environ.keys():
                _events.end_early(code & 0xFF)
