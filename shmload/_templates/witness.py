"""A second process in a caller's process group: it tells signals to the group from others.

Nothing in a signal says whether it was sent to one process or to its group. A process that gets it
as well was in the group. Without a terminal a program has a group of its own, in its template's
session, so the caller passes to that group what its own has got.
"""

import contextlib
import os

from shmload._templates import wire
from shmload._templates.signals import signal

_ANSWER_TIMEOUT_S = 1.0  # it may be stopped; a later answer would be taken for another one


class Witness:
    """Blocks all signals, and looks which of them have come when it is asked.

    It ends with this process. Make it before anything is in the program's group.

    Raises:
        OSError: no process or no descriptor is left.
    """

    def __init__(self) -> None:
        self._pid, self._channel = wire.fork()
        if self._pid == 0:
            _answer(self._channel)
        self._channel.settimeout(_ANSWER_TIMEOUT_S)

    def fileno(self) -> int:
        """Return the descriptor by which it is asked."""
        return self._channel.fileno()

    def has_got(self, number: int) -> bool:
        """Tell whether it has got a signal that this process has just got."""
        with contextlib.suppress(OSError):
            # A signal reaches the processes of a group one after the other, under a lock. This
            # changes nothing, but waits for that lock.
            os.setpgid(0, os.getpgrp())
        try:
            self._channel.send(bytes((number,)))
            return self._channel.recv(1) == b"\1"
        except OSError:
            self._channel.close()
            return False

    def close(self) -> None:
        """End it, and wait for its end."""
        self._channel.close()
        os.waitpid(self._pid, 0)


def _answer(channel: "wire.Socket") -> None:
    """Answer until the other side closes; then end this process."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        kept = channel.fileno()
        os.closerange(0, kept)
        os.closerange(kept + 1, 1 << 20)
        while asked := channel.recv(1):
            channel.send(b"\1" if signal.sigtimedwait(asked, 0) else b"\0")
    finally:
        os._exit(0)
