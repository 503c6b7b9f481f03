"""The copy of a template that is forked ahead for the next program."""

import os
import signal
import time
from _socket import MSG_DONTWAIT
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
        become: called in a copy of this process, with the socket that brings its call, and whether
            there is time to work ahead; returns what runs the program.
        work: returns what a spare does ahead that takes a while, as a number; 0 for nothing.
    """

    def __init__(
        self,
        become: Callable[[wire.Socket, bool], Callable[[], Any]],
        work: Callable[[], int],
    ) -> None:
        self._work = work
        self._has = 0
        """The work of the spare."""
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

    def has_worked(self) -> bool:
        """Tell whether the spare has done what it does ahead, and waits for its call."""
        return self._orders is not None and _is_ready(self._orders)

    def fork(self, *, works_ahead: bool = True) -> None:
        """Fork a spare; if that is not possible now, try again later.

        Args:
            works_ahead: whether it does what can be done before a call comes; false if one has.

        Raises:
            Born: in the copy, once it is a program.
        """
        self._again_at = 0.0
        self._has = self._work()
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
            raise Born(self._become(theirs, works_ahead))
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
        if self._orders and self._has and not self.has_worked():
            self.end()  # it works ahead, which may take longer than the caller waits
        if self._orders is None:
            self.fork(works_ahead=False)
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

    def wait_s(self) -> float | None:
        """Return in how many seconds `tend` has something to do; None for never."""
        return max(0.0, self._again_at - time.monotonic()) if self._again_at else None

    def tend(self) -> None:
        """Replace a spare that has other work; try again where none could be forked."""
        if self._orders and self._has != self._work():
            self.end()
            self.fork()
        if self._again_at and self._again_at <= time.monotonic():
            self.fork()


def _is_ready(orders: wire.Socket) -> bool:
    """Tell whether a spare waits for its call: it has closed its way to here then."""
    try:
        return orders.recv(1, MSG_DONTWAIT) == b""
    except OSError:
        return False
