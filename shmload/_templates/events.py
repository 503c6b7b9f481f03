"""What a program does that only an audit hook sees: files made and removed, and its very end.

A hook stays for the life of a process. This one costs each event the look-up of a name in a set,
and does nothing else unless the name is found.
"""

import ctypes
import os
import sys
from collections.abc import Callable

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


class Events:
    """Watches this process from the first call of `watch`."""

    def __init__(self) -> None:
        self.has_trace = False
        """Whether something was made or removed that stays."""
        self._code: int | None = None
        self._exit = ctypes.PyDLL(None).exit

    def watch(self) -> None:
        """Begin; there is no way back."""
        sys.addaudithook(self._hook())

    def end_early(self, code: int) -> None:
        """Leave out the last step of this process's end, which nothing but memory notices.

        Python frees all strings and types one by one then; in a copy of a template that means to
        copy thousands of pages. Functions that the program has registered with the C library run.

        Args:
            code: with which this process ends, if it ends without another error.
        """
        self._code = code

    def _hook(self) -> Callable[[str, tuple[object, ...]], None]:
        interesting = _TRACES | {"open", "sys.unraisablehook", _LAST}

        # It has everything at hand: at the end there are no globals any more.
        def hook(event: str, args: tuple[object, ...], self: Events = self) -> None:
            if event not in interesting:
                return
            if event == "open":
                flags = args[2]
                if isinstance(flags, int) and flags & _WRITES and args[0] != "/dev/null":
                    self.has_trace = True
            elif event == _LAST:
                if self._code is not None:
                    self._exit(self._code)
            elif event == "sys.unraisablehook":
                self._code = None  # such as a stream that cannot be flushed: Python knows the code
            else:
                self.has_trace = True

        return hook
