"""The process that was called, while its program runs in a copy of a template.

Signals that reach it go to the program. The program's end, or its stop, becomes its own.
"""

import contextlib
import fcntl
import os
import select
import time

from shmload._templates import messages, wire
from shmload._templates.kind import is_stopped
from shmload._templates.messages import Ended, Leaves, Ready, Sets, Stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import NoReturn

    from shmload._templates.wire import Socket
else:
    import _signal as signal  # the module signal imports enum, which takes a millisecond or two

__all__ = ["FORWARDED", "StandIn", "Witness", "signal"]

FORWARDED = sorted(
    signal.valid_signals()
    - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ,
       signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS,
       signal.SIGTRAP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH}
)  # fmt: skip
"""All but those that the kernel sends for a fault, and those that a terminal sends to a group."""

# A template says at once how a program has ended, or is stopped.
_TEMPLATE_TIMEOUT_S = 1.0
# The witness may be stopped; a later answer would be taken for another one.
_WITNESS_TIMEOUT_S = 1.0
# include/uapi/linux/pidfd.h, since Linux 6.15: how a process that is no child has ended.
_PIDFD_INFO_EXIT = 1 << 3
_INFO_NBYTES = 64
_PIDFD_GET_INFO = 3 << 30 | _INFO_NBYTES << 16 | 0xFF << 8 | 11
# Some first processes look for the dead every few seconds only.
_REAPED_TIMEOUT_S = 5.0
_EXIT_CODE = -1
"""Where it is in /proc/PID/stat."""


class StandIn:
    """Stands for a program with whatever waits for this process.

    Args:
        ready: the program's process, and its parent.
        channel: to the template and to the program.
        witness: tells which signals the group of this process has got; None if the program is in
            that group itself.

    Raises:
        OSError: this process has no descriptor left, or the program is gone.
    """

    def __init__(
        self,
        ready: Ready,
        channel: "Socket",
        witness: "Witness | None",
    ) -> None:
        self._pid = ready.pid
        self._channel = channel
        self._witness = witness
        self._waking, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._code: int | None = None
        # If one of these fails, this process becomes another Python, which closes the others.
        self._fd, self._template = os.pidfd_open(ready.pid), os.pidfd_open(ready.template)
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

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
        wire.close_others(used | ({self._witness.fileno()} if self._witness else set()), first=3)

    def _pass_signals_on(self) -> None:
        try:
            numbers = os.read(self._waking, 1 << 10)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGCONT and not is_stopped(self._pid):
                continue  # this process was to continue, with its program
            try:
                if self._witness and self._witness.has_got(number):
                    os.killpg(self._pid, number)
                else:
                    signal.pidfd_send_signal(self._fd, number)
            except ProcessLookupError:  # it has ended; what tells of that comes
                return

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
                _end_as(ended.status)
        return found is not None

    def _end(self) -> "NoReturn":
        """End as the program has ended: as the template says, or else the kernel."""
        channel = self._channel.fileno()
        deadline = time.monotonic() + _TEMPLATE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            found, _, _ = select.select([channel, self._template], [], [], left)
            if channel not in found or not self._listen():
                break
        status = _status_of_ended(self._pid, self._fd)
        if status is not None:
            _end_as(status)
        os._exit(255 if self._code is None else self._code)


# Ends -------------------------------------------------------------------------------------------


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


def _status_of_ended(pid: int, pidfd: int) -> int | None:
    """Return the status of a process that has ended, or None where the kernel does not say it.

    Args:
        pid: its process id, which may be another's once it is reaped.
        pidfd: holds the process itself.
    """
    deadline = time.monotonic() + _REAPED_TIMEOUT_S
    while time.monotonic() < deadline:
        status = _status_before_reaped(pid, pidfd)
        if status is not None:
            return status
        info = bytearray(_PIDFD_INFO_EXIT.to_bytes(8, "little") + bytes(_INFO_NBYTES - 8))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
            if info[0] & _PIDFD_INFO_EXIT:
                return int.from_bytes(info[-4:], "little", signed=True)
        except ProcessLookupError:  # not reaped yet, or this kernel does not know the request
            pass
        except OSError:
            return None
        time.sleep(0.005)
    return None


def _status_before_reaped(pid: int, pidfd: int) -> int | None:
    """Return the status of a process that has ended and that its parent has not asked for."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            status = int(file.read().split()[_EXIT_CODE])
        with open(f"/proc/self/fdinfo/{pidfd}", "rb", buffering=0) as file:
            is_there = b"\nPid:\t%d\n" % pid in file.read()
    except OSError:
        return None
    return status if is_there else None


# Signals to a group -----------------------------------------------------------------------------


class Witness:
    """A second process in a caller's process group: it tells signals to the group from others.

    Nothing in a signal says whether it was sent to one process or to its group. A process that gets
    it as well was in the group. Without a terminal a program has a group of its own, in its
    template's session, so the caller passes to that group what its own has got.

    It blocks all signals, and looks which of them have come when it is asked. It ends with
    this process. Make it before anything is in the program's group.

    Raises:
        OSError: no process or no descriptor is left.
    """

    def __init__(self) -> None:
        self._pid, self._channel = wire.fork()
        if self._pid == 0:
            _answer(self._channel)
        self._channel.settimeout(_WITNESS_TIMEOUT_S)

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
        wire.close_others([channel.fileno()])
        while asked := channel.recv(1):
            channel.send(b"\1" if signal.sigtimedwait(asked, 0) else b"\0")
    finally:
        os._exit(0)
