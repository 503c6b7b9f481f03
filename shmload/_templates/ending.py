"""What a program has done so far, and what it leaves undone at its end."""

import ctypes
import fcntl
import os
import signal
import stat
import sys
from contextlib import suppress
from typing import Any

from shmload._templates import messages

# F_SETSIG is not in the module fcntl.
_F_SETSIG = 10
# What measures a program often writes its report at the very end.
_MEASURED = {"LD_PRELOAD", "PYTHONDUMPREFS", "PYTHONINSPECT", "PYTHONMALLOCSTATS"}
# Done twice if the program were started over, and seen in no count of bytes written.
_TRACES = frozenset({
    "builtins.input", "fcntl.flock", "fcntl.lockf", "os.chmod", "os.chown", "os.fork", "os.kill",
    "os.killpg", "os.link", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir",
    "os.setxattr", "os.symlink", "os.system", "os.truncate", "os.utime", "socket.bind",
    "socket.connect", "socket.sendmsg", "socket.sendto", "sqlite3.connect", "subprocess.Popen",
    "syslog.syslog",
})  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# After modules and streams are gone, before the interpreter takes itself apart.
_LAST = "cpython.PyInterpreterState_Clear"


class Traces:
    """What this process does from now on that would be done twice if its program started over.

    Some only an audit hook sees, which stays for the life of the process. It costs each event the
    look-up of a name in a set, and does nothing else unless the name is found.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._has_trace = False
        self._code: int | None = None
        self._streams: list[Any] = []
        self._exit = ctypes.PyDLL(None).exit
        self._before = _look()
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
                    self._has_trace = True
            elif event == _LAST:
                for stream in self._streams:
                    with suppress(Exception):  # the program may have closed or replaced it
                        stream.flush()
                if self._code is not None:
                    self._exit(self._code)
            elif event == "sys.unraisablehook":
                self._code = None  # such as a stream that cannot be flushed: Python knows the code
            else:
                self._has_trace = True

        sys.addaudithook(hook)

    def is_none(self) -> bool:
        """Tell whether nothing was written, made, removed, started or read since."""
        with suppress(OSError):  # it has closed a standard stream
            kind = os.fstat(0).st_mode
            may_be_read = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
            is_alone = len(os.listdir("/proc/self/task")) == 1
            return not self._has_trace and not may_be_read and is_alone and _look() == self._before
        return False

    def leave(self) -> None:
        """See to the end of the program, as far as it is known before that.

        What destructors of the program's modules print is written: Python does so when it ends the
        streams, but a library of the template may hold these.

        The last step is left out, which nothing but memory notices: Python frees all strings and
        types one by one then; in a copy of a template that means to copy thousands of pages.
        Functions that the program has registered with the C library run.
        """
        exc = sys.exc_info()[1]
        if exc and exc.__traceback__:
            exc.__traceback__ = exc.__traceback__.tb_next  # the first frame is the template's
        code = 0 if exc is None else 1
        if isinstance(exc, SystemExit):
            code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
        # Python ends with SIGINT after KeyboardInterrupt, and asks for commands if told so. A child
        # that the program has forked ends here, too.
        is_plain = not isinstance(exc, KeyboardInterrupt) and abs(code) < 1 << 31
        if is_plain and os.getpid() == self._pid and not _MEASURED & os.environ.keys():
            self._streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
            self._code = code & 0xFF


def _look() -> tuple[object, ...]:
    """Return how many bytes were written, the directory, the streams, and how far input is read."""
    with open("/proc/self/io", encoding="ascii") as lines:
        written = next(line for line in lines if line.startswith("wchar"))
    streams = [(each.st_dev, each.st_ino) for each in map(os.fstat, range(3))]
    position = os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(os.fstat(0).st_mode) else 0
    return written, os.getcwd(), streams, position


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


def die_with(channel: messages.Socket, *, with_group: bool) -> None:
    """Have the kernel kill this process when the caller's end of the socket closes.

    Args:
        channel: the socket.
        with_group: kill all processes of this one's group too.
    """
    fcntl.fcntl(channel, fcntl.F_SETOWN, -os.getpgrp() if with_group else os.getpid())
    fcntl.fcntl(channel, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC)


def live_without(channel: messages.Socket) -> None:
    """Undo `die_with`, in any process that has the socket."""
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags & ~os.O_ASYNC)
