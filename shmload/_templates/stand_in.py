"""The process that was called, while its program runs in a copy of a template.

Signals that reach it go to the program. The program's end, or its stop, becomes its own.
"""

import os
import select
import time

from shmload._templates import messages
from shmload._templates.ending import end_as, status_of_ended
from shmload._templates.messages import Ended, Go, Leaves, Ready, Sets, Stopped
from shmload._templates.signals import FORWARDED, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from shmload._templates.wire import Socket
    from shmload._templates.witness import Witness

# A template says at once how a program has ended, or is stopped.
_TEMPLATE_TIMEOUT_S = 1.0


class StandIn:
    """Stands for a program with whatever waits for this process.

    Args:
        ready: the program's process, and its parent.
        channel: to the template and to the program.
        waking: becomes readable when a signal has come.
        woken: the other end of `waking`.
        witness: tells which signals the group of this process has got; None if the program is in
            that group itself.

    Raises:
        OSError: this process has no descriptor left, or the program is gone.
    """

    def __init__(
        self,
        ready: Ready,
        channel: "Socket",
        waking: int,
        woken: int,
        witness: "Witness | None",
    ) -> None:
        self._pid = ready.pid
        self._channel = channel
        self._witness = witness
        self._waking, self._woken = waking, woken
        self._code: int | None = None
        self._fd = os.pidfd_open(ready.pid)
        try:
            self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._template = os.pidfd_open(ready.template)
            except OSError:
                os.close(self._null)
                raise
        except OSError:
            os.close(self._fd)
            raise

    def let_go(self) -> None:
        """Let the program run.

        Raises:
            OSError: it has ended before.
        """
        self._channel.settimeout(None)
        messages.send(self._channel, Go())

    def wait(self, note: "Callable[[list[list[str]]], None]") -> "NoReturn":
        """Pass signals on, and end as the program ends.

        Args:
            note: called with the variables that the program has set before its imports.
        """
        self._note = note
        self._give_up_streams()
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in FORWARDED:
            try:
                signal.signal(number, lambda *_: None)
            except (OSError, ValueError):  # signals that the C library keeps
                continue
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        poll = select.poll()
        for fd in (self._channel.fileno(), self._waking, self._fd):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._waking:
                    self._pass_signals_on()
                elif fd == self._fd:
                    self._end()
                elif not self._listen():
                    poll.unregister(fd)

    def _give_up_streams(self) -> None:
        """Close what the program has: the ends of pipes are its own now."""
        for fd in range(3):
            os.dup2(self._null, fd)
        used = {self._fd, self._template, self._channel.fileno(), self._waking, self._woken}
        kept = sorted(used | ({self._witness.fileno()} if self._witness else set()))
        for low, high in zip([2, *kept], [*kept, 1 << 20], strict=True):
            os.closerange(low + 1, high)

    def _pass_signals_on(self) -> None:
        try:
            numbers = os.read(self._waking, 1 << 10)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGCONT and not self._is_stopped():
                continue  # this process was to continue, with its program
            try:
                if self._witness and self._witness.has_got(number):
                    os.killpg(self._pid, number)
                else:
                    signal.pidfd_send_signal(self._fd, number)
            except ProcessLookupError:  # it has ended; what tells of that comes
                return

    def _is_stopped(self) -> bool:
        try:
            with open(f"/proc/{self._pid}/stat", "rb", buffering=0) as file:
                return file.read().rpartition(b")")[2].split()[0] == b"T"
        except OSError:
            return False

    def _listen(self) -> bool:
        """Take one message; tell whether more may come."""
        try:
            found = messages.receive(self._channel, Sets, Leaves, Stopped, Ended)
        except ValueError:
            return True  # the program can write what it likes there; the template tells of its end
        match found:
            case [Sets() as sets, _]:
                self._note(sets.settings)
            case [Leaves() as leaves, _]:
                self._code = leaves.code
            case [Stopped(), _]:
                os.kill(os.getpid(), signal.SIGSTOP)  # the template continues it
            case [Ended() as ended, _]:
                end_as(ended.status)
        return found is not None

    def _end(self) -> "NoReturn":
        """End as the program has ended: as the template says, or else the kernel."""
        channel = self._channel.fileno()
        deadline = time.monotonic() + _TEMPLATE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            found, _, _ = select.select([channel, self._template], [], [], left)
            if channel not in found or not self._listen():
                break
        status = status_of_ended(self._pid, self._fd)
        if status is not None:
            end_as(status)
        os._exit(255 if self._code is None else self._code)
