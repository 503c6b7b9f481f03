"""Processes that shmload starts: each runs one of its modules, and is reaped.

    started --close--> SIGKILL, reaped
       +-------end---> SIGTERM, SIGKILL after a deadline, reaped

Guarantee: a child imports nothing from the current directory and gets no Ctrl-C that is meant for
its parent. After `close` or `end` it has ended, or the log says why it could not be ended.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys

from shmload._host.changes import forks_wait
from shmload._host.descriptors import Descriptor
from shmload._host.memory import call
from shmload._wording import logger_of

logger = logger_of(__name__)

_KILL_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OUTPUT_NBYTES = 4000


def how_it_ended(code: int) -> str:
    """Name the end of a process, such as `SIGKILL` or `exit code 3`.

    Args:
        code: as `subprocess` and `os.waitstatus_to_exitcode` give it, negative for a signal.
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Tell the kernel to send this process a signal when the thread that forked it ends.

    Args:
        number: of the signal.

    Raises:
        OSError: the kernel refuses; not known to happen.
    """
    if code := call("prctl", _PR_SET_PDEATHSIG, number):
        raise OSError(code, "prctl(PR_SET_PDEATHSIG)")


def has_pidfds() -> bool:
    """Tell whether pidfds can be opened; a sandbox may forbid it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _environment() -> dict[str, str]:
    """Return this process's environment without what systemd has told this process alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LISTEN_") and name != "NOTIFY_SOCKET"
    }


def start(
    module: str,
    *arguments: str,
    channel_timeout_s: float | None = None,
    stdout: int | None = None,
) -> "Child":
    """Start a module as `python -P -m MODULE ARGUMENTS`.

    Args:
        module: the module.
        arguments: its command line.
        channel_timeout_s: if given, two more arguments are CHANNEL, the number of the child's end
            of a Unix socket, and PARENT, this process's id. This end waits so long in a send or a
            receive, in seconds: a child that has stopped reading must not block this process. What
            it prints goes to a file in memory, of which `Child.output` has the end.
        stdout: a descriptor, `subprocess.PIPE`, or None for this process's stream.

    Raises:
        OSError: processes, memory or descriptors are used up, or sys.executable is no Python.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        channel, passed, output = None, [], Descriptor(-1)
        if channel_timeout_s is not None:
            channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.enter_context(channel)
            with end:
                # A process without standard streams would give the socket one of their numbers.
                passed = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3)]
            theirs.callback(os.close, passed[0])
            channel.settimeout(channel_timeout_s)
            arguments = (*arguments, str(passed[0]), str(os.getpid()))
            output.fd = stdout = os.memfd_create("shmload-output", os.MFD_CLOEXEC)
            ours.enter_context(output)
        # -P: a json.py in the user's directory must not be imported. Not multiprocessing: its spawn
        # imports the user's main module, its fork copies torch's threads.
        command = [sys.executable, "-P", "-m", module, *arguments]
        # Ctrl-C goes to the whole foreground group; a child inherits that it is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with forks_wait():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stdout if channel else None,
                    pass_fds=passed,
                    env=_environment(),
                )
            child = Child(module, process, channel, output)
            ours.callback(child.close)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # may raise KeyboardInterrupt
        child.pidfd = os.pidfd_open(child.pid)
        ours.pop_all()
    return child


class Child:
    """A process that `start` has started, from here until `close` or `end`.

    Attributes:
        process: the `Popen` object, for its pipes.
        pidfd: readable once the child has ended; -1 after `close`.
    """

    def __init__(
        self,
        module: str,
        process: "subprocess.Popen[bytes]",
        channel: socket.socket | None,
        output: Descriptor,
    ) -> None:
        self.module = module
        self.process = process
        self.pidfd = -1
        self._channel = channel
        self._output = output

    @property
    def channel(self) -> socket.socket:
        """This process's end of the child's socket; closed with the child."""
        assert self._channel is not None
        return self._channel

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def has_exited(self) -> bool:
        """Whether it ended by itself and not by a signal."""
        code = self.process.poll()
        return code is not None and code >= 0

    def how_it_ended(self) -> str:
        """Wait for its end and name it, such as `SIGKILL` or `exit code 3`."""
        return how_it_ended(self.process.wait(_KILL_TIMEOUT_S))

    def output(self) -> str:
        """Return the end of what it has printed so far; not after `close`."""
        fd = self._output.fd
        begin = max(0, os.fstat(fd).st_size - _OUTPUT_NBYTES)
        tail = os.pread(fd, _OUTPUT_NBYTES, begin)
        return tail.decode(errors="replace").strip()

    def kill(self) -> None:
        """Send SIGKILL; do not wait."""
        self.process.kill()

    def end(self, timeout_s: float = _KILL_TIMEOUT_S, *, ask: bool = True) -> str:
        """Ask it to end, kill it after `timeout_s`, reap it, and return how it ended.

        Args:
            timeout_s: how long to wait before SIGKILL, in seconds.
            ask: send SIGTERM first; False if the child ends for another reason.
        """
        if ask:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.close()

    def close(self) -> str:
        """Kill it if it runs, reap it, and return how it ended; a second call is fine."""
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_TIMEOUT_S)
        self._release()
        code = self.process.returncode
        if code is None:
            # Killed, but inside the kernel: a dead disk can hold a process there for ever.
            logger.error(
                "process %d (%s) cannot be ended; it waits for a device", self.pid, self.module
            )
            return "not ended: it waits for a device"
        return how_it_ended(code)

    def _release(self) -> None:
        if self._channel:
            self._channel.close()
        self._output.close()
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)
