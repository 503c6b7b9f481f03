"""The programs of a template: the copy that waits for one, and those that run."""

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any

from shmload._templates import leaving, messages, wire
from shmload._templates.connections import Peer
from shmload._templates.imports import Unfit
from shmload._templates.messages import Call, Ended, Message, Stopped

_MAX_LOST = 3


class Born(BaseException):
    """This process is a program from now on: leave the template's frames, and call `run`."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run


class Serving:
    """Hands calls to the spare, forks the next one, and tells callers what becomes of programs.

    It keeps one spare, as far as the system has room for it. A program whose caller is gone ends.

    Args:
        become: called in each copy, with the socket that brings its call; returns what runs the
            program.
    """

    def __init__(self, become: Callable[[wire.Socket], Callable[[], Any]]) -> None:
        self.poll = select.poll()
        self._waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Becomes readable when a child has changed."""
        self.poll.register(self._waking, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self._become = become
        self.spare = 0
        """Process id of the copy that waits for a program; 0 if there is none."""
        self._orders: wire.Socket | None = None
        self._lost = 0
        """Spares that ended before they were used, since one was."""
        self._callers: dict[int, Peer] = {}
        """By process of a program that runs."""

    @property
    def programs(self) -> int:
        """How many programs run."""
        return len(self._callers)

    def fork(self) -> None:
        """Fork a spare, if that is possible now.

        Raises:
            Born: in the copy, once it is a program.
        """
        try:
            pid, channel = wire.fork()
        except OSError:  # too many processes, or no memory: the next call tries again
            return
        if pid == 0:
            raise Born(self._become(channel))
        self._orders, self.spare = channel, pid

    def start(self, call: Call, caller: Peer) -> None:
        """Have the spare become a program, and fork the next one.

        Args:
            call: of the program.
            caller: owned by this from now on, unless it raises.

        Raises:
            OSError: there is no spare, and none can be forked.
            Born: in a copy.
        """
        if self._orders is None:
            self.fork()
        if self._orders is None:
            raise BlockingIOError(0, "no process or no memory is left")
        channel = caller.channel.fileno()
        messages.send(self._orders, call, (channel, caller.fd), waits=False)
        self._lost = 0
        self._callers[self.spare] = caller
        self.poll.register(channel, 0)  # its end is always told
        self.forget_spare()
        self.fork()

    def wait(self, timeout_ms: float | None = None) -> tuple[list[int], list[int]]:
        """Wait until something has happened, and see to programs and the spare.

        Returns:
            The children that ended, and the descriptors of others that can be read.

        Raises:
            Unfit: spares end again and again before they are used.
            Born: in a copy.
        """
        ended, others = [], []
        for fd, _ in self.poll.poll(timeout_ms):
            if fd == self._waking:
                ended = self._reap()
            elif not self._end_if_lost(fd):
                others.append(fd)
        return ended, others

    def _reap(self) -> list[int]:
        """Learn what has become of children, and tell their callers; return those that ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._waking, 1 << 10)
        ended: list[int] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            caller = self._callers.get(pid)
            if os.WIFSTOPPED(status):
                _tell(caller, Stopped(os.WSTOPSIG(status)))
            elif os.WIFCONTINUED(status):
                if caller:
                    with contextlib.suppress(ProcessLookupError):  # it has stopped with it
                        signal.pidfd_send_signal(caller.fd, signal.SIGCONT)
            else:
                ended.append(pid)
                if caller:
                    leaving.live_without(caller.channel)  # what the program has started goes on
                    _tell(caller, Ended(status))
                    self._forget(pid)
                elif pid == self.spare:
                    self._replace_spare()

    def _end_if_lost(self, fd: int) -> bool:
        """End the program whose caller has gone, if this is the caller's socket; tell whether."""
        pid = next((p for p, each in self._callers.items() if each.channel.fileno() == fd), 0)
        if not pid:
            return False
        os.kill(pid, signal.SIGKILL)  # a child that is not reaped yet
        with contextlib.suppress(ProcessLookupError):  # it is in its caller's group
            os.killpg(pid, signal.SIGKILL)
        self._forget(pid)
        return True

    def close_all(self) -> None:
        """Close the sockets of callers, in a copy, which has nothing to do with them."""
        for caller in self._callers.values():
            caller.close()

    def end_spare(self) -> None:
        """End the spare; there is none from now on."""
        if self.spare:
            os.kill(self.spare, signal.SIGKILL)  # a child that is not reaped yet
        self.forget_spare()

    def forget_spare(self) -> None:
        """Leave the spare to itself, or in a copy to the process that has forked it."""
        if self._orders:
            self._orders.close()
        self._orders, self.spare = None, 0

    def _replace_spare(self) -> None:
        self._lost += 1
        self.forget_spare()
        if self._lost > _MAX_LOST:
            raise Unfit("its copies end before they are used")
        self.fork()

    def _forget(self, pid: int) -> None:
        caller = self._callers.pop(pid)
        self.poll.unregister(caller.channel.fileno())
        caller.close()


def _tell(caller: Peer | None, message: Message) -> None:
    # A caller that has stopped reads nothing, and must not delay the others; what it does not get
    # it learns from the end of its socket and from the kernel.
    with contextlib.suppress(OSError):
        if caller:
            messages.send(caller.channel, message, waits=False)
