"""The process that was called, while its program runs in a copy of a template.

Signals that reach it go to the program. The program's end, or its stop, becomes its own.
"""

import os
import select

from shmload._templates import messages
from shmload._templates.identity import is_stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn

    from shmload._templates.messages import Socket
else:
    import _signal as signal  # the module signal imports enum, which takes a millisecond or two

__all__ = ["FORWARDED", "StandIn", "signal"]

FORWARDED = sorted(
    signal.valid_signals()
    - {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE,
       signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)  # fmt: skip
"""All signals but those for faults, and those that no process can handle."""

# The end of a killed template shows at once. One that imports what loads have kept, or looks at
# files of a slow disk, is silent for seconds. One that is stopped may never say anything.
_TIMEOUT_S = 60.0
_UNKNOWN = 255


class StandIn:
    """Stands for a program with whatever waits for this process.

    Args:
        pid: the program's process.
        channel: to the template.

    Raises:
        OSError: this process has no descriptor left, or the program is gone.
    """

    def __init__(self, pid: int, channel: "Socket") -> None:
        self._pid, self._channel = pid, channel
        self._waking, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # If one of these fails, this process becomes another Python, which closes the others.
        self._fd = os.pidfd_open(pid)
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def wait(self) -> "NoReturn":
        """Pass signals on, and end as the program ends."""
        self._give_up_streams()
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in FORWARDED:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        poll = select.poll()
        channel = self._channel.fileno()
        for fd in (channel, self._waking, self._fd):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._waking:
                    self._pass_signals_on()
                elif fd == channel and not self._listen():
                    poll.unregister(channel)  # the template is gone, and the program may go on
                elif fd == self._fd and not self._hears_of_the_end():
                    os._exit(_UNKNOWN)

    def _hears_of_the_end(self) -> bool:
        """Tell whether the template says something of a program that has ended."""
        return bool(select.select([self._channel], [], [], _TIMEOUT_S)[0]) and self._listen()

    def _give_up_streams(self) -> None:
        """Close what the program has: the ends of pipes are its own now."""
        for fd in range(3):
            os.dup2(self._null, fd)
        used = {self._fd, self._channel.fileno(), self._waking, self._woken}
        messages.close_others(used, first=3)

    def _pass_signals_on(self) -> None:
        try:
            numbers = os.read(self._waking, 1 << 10)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGCONT and not is_stopped(self._pid):
                continue  # this process was to continue, with its program
            try:
                signal.pidfd_send_signal(self._fd, number)
            except OSError:  # it has ended, or runs as another user, as `sudo` does
                return

    def _listen(self) -> bool:
        """Take one message; tell whether more may come."""
        said = messages.receive(self._channel)
        match said.split():
            case [messages.STOPPED]:
                os.kill(os.getpid(), signal.SIGSTOP)  # the template continues it
            case [b"ended", status] if status.isdigit():
                _end_as(int(status))
        return bool(said)  # the program can write there what it likes


def _end_as(status: int) -> "NoReturn":
    """End this process as another one has ended, by its status from `os.waitpid`."""
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
