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
from collections.abc import Mapping, Sequence

from shmload._host.changes import forks_wait
from shmload._wording import logger_of

logger = logger_of(__name__)

_KILL_TIMEOUT_S = 10.0


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


def child_environment() -> dict[str, str]:
    """Return this process's environment without what systemd has told this process alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LISTEN_") and name != "NOTIFY_SOCKET"
    }


class Child:
    """A process that runs a module of shmload, from here until `close` or `end`.

    Args:
        module: run as `python -P -m MODULE ARGUMENTS`.
        arguments: its command line.
        env: its environment.
        stdout: a descriptor, `subprocess.PIPE`, or None for this process's stream.
        stderr: likewise.
        pass_fds: descriptors that it inherits, with the same numbers.

    Attributes:
        process: the `Popen` object, for its pipes.
        pidfd: readable once the child has ended; -1 after `close`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        # -P: a json.py in the user's directory must not be imported. Not multiprocessing: its spawn
        # imports the user's main module, its fork copies torch's threads.
        command = [sys.executable, "-P", "-m", module, *arguments]
        self.module = module
        self.pidfd = -1
        with contextlib.ExitStack() as undoing:
            # Ctrl-C goes to the whole foreground group; a child inherits that it is blocked.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with forks_wait():
                    self.process: subprocess.Popen[bytes] = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        pass_fds=pass_fds,
                        env=env,
                    )
                undoing.callback(self.close)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)  # may raise KeyboardInterrupt
            self.pidfd = os.pidfd_open(self.pid)
            undoing.pop_all()

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
        self._close_pidfd()
        code = self.process.returncode
        if code is None:
            # Killed, but inside the kernel: a dead disk can hold a process there for ever.
            logger.error(
                "process %d (%s) cannot be ended; it waits for a device", self.pid, self.module
            )
            return "not ended: it waits for a device"
        return how_it_ended(code)

    def forget(self) -> None:
        """Forget it in a forked copy of this process, which is not its parent."""
        self._close_pidfd()
        self.process.returncode = 0  # or Popen would complain

    def _close_pidfd(self) -> None:
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)


def start_with_channel(
    module: str,
    *,
    timeout_s: float,
    env: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
) -> tuple[Child, socket.socket]:
    """Start a module as `python -P -m MODULE CHANNEL PARENT`, with a Unix socket to it.

    CHANNEL is the number of the child's end, PARENT this process's id.

    Args:
        module: see `Child`.
        timeout_s: how long this end waits in a send or a receive, in seconds. A child that has
            stopped reading must not block this process for ever.
        env: see `Child`.
        stdout: see `Child`.
        stderr: see `Child`.

    Returns:
        The child and this process's end; the caller closes both.

    Raises:
        OSError: processes, memory or descriptors are used up, or sys.executable is no Python.
    """
    with contextlib.ExitStack() as undoing:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        undoing.enter_context(ours)
        with theirs:
            # A process without standard streams would give the socket one of their numbers.
            fd = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        undoing.callback(os.close, fd)
        ours.settimeout(timeout_s)
        child = Child(
            module,
            [str(fd), str(os.getpid())],
            env=env,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[fd],
        )
        undoing.callback(child.close)
        undoing.pop_all()
        os.close(fd)
    return child, ours
