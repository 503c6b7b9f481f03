"""The programs that run in copies of a template, and the callers that stand for them."""

import contextlib
import os
import select
import signal
from dataclasses import dataclass

from shmload._templates import leaving, messages, wire
from shmload._templates.messages import Ended, Message, Stopped
from shmload._templates.rights import Peer


@dataclass(frozen=True, slots=True)
class Running:
    """A program that runs, or is about to.

    Fields:
        channel: its caller's socket, owned by this.
        peer: its caller, owned by this.
    """

    channel: wire.Socket
    peer: Peer


class Programs:
    """Tells callers what becomes of their programs, and programs when their caller is gone.

    Args:
        poll: of the template; told of the sockets to watch.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._running: dict[int, Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(self, pid: int, program: Running) -> None:
        """Watch over a program from now on.

        Args:
            pid: its process, a child of this one.
            program: what belongs to it.
        """
        self._running[pid] = program
        self._poll.register(program.channel.fileno(), 0)  # its end is always told

    def close_all(self) -> None:
        """Close all sockets, in a copy of the template, which has nothing to do with them."""
        for program in self._running.values():
            program.channel.close()
            program.peer.close()

    def child_has_changed(self, pid: int, status: int) -> None:
        """Pass on what `os.waitpid` says of a child, be it a program or not."""
        program = self._running.get(pid)
        if program is None:
            return
        if os.WIFSTOPPED(status):
            _tell(program, Stopped(os.WSTOPSIG(status)))
        elif os.WIFCONTINUED(status):
            with contextlib.suppress(ProcessLookupError):  # its caller has stopped with it
                signal.pidfd_send_signal(program.peer.fd, signal.SIGCONT)
        else:
            leaving.live_without(program.channel)  # what it has started goes on
            _tell(program, Ended(status))
            self._forget(pid)

    def end_if_lost(self, fd: int) -> None:
        """End the program whose caller has gone, if this is the caller's socket."""
        for pid, program in list(self._running.items()):
            # The number may be that of another caller since.
            if program.channel.fileno() == fd and _is_gone(fd):
                os.kill(pid, signal.SIGKILL)  # a child that is not reaped yet
                with contextlib.suppress(ProcessLookupError):  # it is in its caller's group
                    os.killpg(pid, signal.SIGKILL)
                self._forget(pid)

    def _forget(self, pid: int) -> None:
        program = self._running.pop(pid)
        self._poll.unregister(program.channel.fileno())
        program.channel.close()
        program.peer.close()


def _tell(program: Running, message: Message) -> None:
    # A caller that has stopped reads nothing, and must not delay the others; what it does not get
    # it learns from the end of its socket and from the kernel.
    with contextlib.suppress(OSError):
        messages.send(program.channel, message, waits=False)


def _is_gone(fd: int) -> bool:
    """Tell whether the other side has closed."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
