"""The end of a program: what it has done by then, what it says of it, and what it leaves undone."""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shmload._templates import messages, wire
from shmload._templates.messages import Leaves

# F_SETSIG is not in the module fcntl.
_F_SETSIG = 10
# What measures a program often writes its report at the very end.
_MEASURED = {"LD_PRELOAD", "PYTHONDUMPREFS", "PYTHONINSPECT", "PYTHONMALLOCSTATS"}

# Done twice if the program were started over, and seen in no count of bytes written.
_TRACES = frozenset({
    "fcntl.flock", "fcntl.lockf", "os.chflags", "os.chmod", "os.chown", "os.kill", "os.killpg",
    "os.link", "os.lockf", "os.mkdir", "os.remove", "os.removexattr", "os.rename", "os.rmdir",
    "os.setxattr", "os.symlink", "os.truncate", "os.utime", "shutil.rmtree", "signal.pthread_kill",
    "socket.bind", "socket.connect", "socket.sendmsg", "socket.sendto", "sqlite3.connect",
    "syslog.openlog", "syslog.syslog", "tempfile.mkdtemp", "tempfile.mkstemp",
})  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# After modules and streams are gone, before the interpreter takes itself apart.
_LAST = "cpython.PyInterpreterState_Clear"


class Traces:
    """What a program does that would be done twice if it were started over, and its very end.

    Some only an audit hook sees, which stays for the life of the process. It costs each event the
    look-up of a name in a set, and does nothing else unless the name is found.
    """

    def __init__(self) -> None:
        self.has_trace = False
        """Whether something was made or removed that stays."""
        self._code: int | None = None
        self._streams: list[Any] = []
        self._exit = ctypes.PyDLL(None).exit

    def watch(self) -> None:
        """Begin to see events; there is no way back."""
        sys.addaudithook(self._hook())

    def note(self) -> None:
        """Note how things are now."""
        self._seen = self._look()

    def is_none(self) -> bool:
        """Tell whether nothing was written, made, removed, started or read since."""
        if self.has_trace:
            return False
        kind = os.fstat(0).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(0):
            return False
        return self._look() == self._seen and len(os.listdir("/proc/self/task")) == 1

    def end(self, code: int | None) -> None:
        """See to the very end of this process.

        What destructors of the program's modules print is written: Python does so when it ends the
        streams, but a library of the template may hold these.

        The last step is left out, which nothing but memory notices: Python frees all strings and
        types one by one then; in a copy of a template that means to copy thousands of pages.
        Functions that the program has registered with the C library run.

        Args:
            code: with which this process ends, if it ends without another error; None to have the
                last step, too.
        """
        self._streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
        self._code = code

    def _hook(self) -> Callable[[str, tuple[object, ...]], None]:
        interesting = _TRACES | {"open", "sys.unraisablehook", _LAST}

        # It has everything at hand: at the end there are no globals any more.
        def hook(
            event: str, args: tuple[object, ...], self: Traces = self, suppress: Any = suppress
        ) -> None:
            if event not in interesting:
                return
            if event == "open":
                flags = args[2]
                if isinstance(flags, int) and flags & _WRITES and args[0] != "/dev/null":
                    self.has_trace = True
            elif event == _LAST:
                for stream in self._streams:
                    with suppress(Exception):  # the program may have closed or replaced it
                        stream.flush()
                if self._code is not None:
                    self._exit(self._code)
            elif event == "sys.unraisablehook":
                self._code = None  # such as a stream that cannot be flushed: Python knows the code
            else:
                self.has_trace = True

        return hook

    @staticmethod
    def _look() -> tuple[object, ...]:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            children = file.read()
        place = os.stat(".")
        streams = [(found.st_dev, found.st_ino) for found in map(os.fstat, range(3))]
        position = os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(os.fstat(0).st_mode) else 0
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
        found = (place.st_dev, place.st_ino)
        return _bytes_written(), children, ended, found, streams, position


def _bytes_written() -> int:
    """Return how many bytes this process has handed to write(2) and its like."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


_channel: wire.Socket | None = None
_program: tuple[int, int] = (0, 0)
"""The program's process, and the inode of the channel; its descriptor may be another's by then."""
_traces: Traces | None = None


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


def begin(channel: wire.Socket, traces: Traces) -> None:
    """Note that this process is a program from now on.

    Args:
        channel: to its caller.
        traces: watches this process.
    """
    global _channel, _program, _traces
    _channel, _traces = channel, traces
    _program = (os.getpid(), os.fstat(channel.fileno()).st_ino)


def leave() -> None:
    """Tell the caller how the program ends, as far as that is known before it does."""
    exc = sys.exc_info()[1]
    if exc and exc.__traceback__:
        exc.__traceback__ = exc.__traceback__.tb_next  # the first frame is the template's
    code = 0 if exc is None else 1
    if isinstance(exc, SystemExit):
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    with contextlib.suppress(Exception):  # the program may have closed or replaced anything
        if _channel and _program == (os.getpid(), os.fstat(_channel.fileno()).st_ino):
            live_without(_channel)
            messages.send(_channel, Leaves(code & 0xFF))
            # Python ends with SIGINT after KeyboardInterrupt, and asks for commands if told so.
            is_plain = not isinstance(exc, KeyboardInterrupt) and abs(code) < 1 << 31
            if _traces:
                _traces.end(code & 0xFF if is_plain and not _MEASURED & os.environ.keys() else None)
