"""The copy of a template that is forked ahead for the next program."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from shmload._templates import messages, wire
from shmload._templates.copies import Unfit
from shmload._templates.messages import Call

_MAX_LOST = 3
# When no process can be started, the next attempt is made after this time.
_PAUSE_S = 1.0


class Born(BaseException):
    """This process is a program from now on: leave the template's frames, and call `run`."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run


class Spares:
    """Keeps one spare, as far as the system has room for it.

    Args:
        become: called in a copy of this process, with the socket that brings its call; returns what
            runs the program.
    """

    def __init__(self, become: Callable[[wire.Socket], Callable[[], Any]]) -> None:
        self._become = become
        self._pid = 0
        self._orders: wire.Socket | None = None
        self._lost = 0
        """Spares that ended before they were used, since one was."""
        self._again_at = 0.0

    @property
    def pid(self) -> int:
        """Process id of the spare; 0 if there is none."""
        return self._pid

    def fork(self) -> None:
        """Fork a spare; if that is not possible now, try again later.

        Raises:
            Born: in the copy, once it is a program.
        """
        self._again_at = 0.0
        try:
            ours, theirs = wire.pair()
        except OSError:
            self._again_at = time.monotonic() + _PAUSE_S
            return
        try:
            pid = os.fork()
        except OSError:  # too many processes, or no memory
            ours.close()
            theirs.close()
            self._again_at = time.monotonic() + _PAUSE_S
            return
        if pid == 0:
            ours.close()
            raise Born(self._become(theirs))
        theirs.close()
        self._orders, self._pid = ours, pid

    def hand_over(self, call: Call, fds: Sequence[int]) -> int:
        """Have the spare become a program; return its process id.

        Args:
            call: of the program.
            fds: its caller's socket, and a descriptor of the caller's process.

        Raises:
            OSError: there is no spare, and none can be forked.
            Born: in the copy, if it had to be forked first.
        """
        if self._orders is None:
            self.fork()
        if self._orders is None:
            raise BlockingIOError(0, "no process or no memory is left")
        messages.send(self._orders, call, fds, waits=False)
        self._orders.close()
        pid, self._orders, self._pid, self._lost = self._pid, None, 0, 0
        return pid

    def has_ended(self, pid: int) -> None:
        """Replace the spare if it was this process.

        Raises:
            Unfit: spares end again and again before they are used.
            Born: in the next one.
        """
        if pid != self._pid or self._orders is None:
            return
        self._lost += 1
        self._orders.close()
        self._orders, self._pid = None, 0
        if self._lost > _MAX_LOST:
            raise Unfit("its copies end before they are used")
        self.fork()

    def end(self) -> None:
        """End the spare; there is none from now on."""
        self._again_at = 0.0
        if self._orders:
            os.kill(self._pid, signal.SIGKILL)  # a child that is not reaped yet
            self._orders.close()
            self._orders, self._pid = None, 0

    def forget(self) -> None:
        """Leave the spare to the process that has forked it: this one is a copy."""
        if self._orders:
            self._orders.close()
            self._orders, self._pid = None, 0

    def wait_s(self) -> float | None:
        """Return in how many seconds `tend` has something to do; None for never."""
        return max(0.0, self._again_at - time.monotonic()) if self._again_at else None

    def tend(self) -> None:
        """Try again where no spare could be forked."""
        if self._again_at and self._again_at <= time.monotonic():
            self.fork()
