"""What a template and its branches have in common: a spare, and the programs that it became."""

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any

from shmload._templates import wire
from shmload._templates.messages import Call
from shmload._templates.programs import Programs, Running
from shmload._templates.rights import Peer
from shmload._templates.spares import Spares


class Serving:
    """Hands calls to the spare, forks the next one, and tells callers what becomes of programs.

    Args:
        become: called in each copy, with the socket that brings its call; returns what runs the
            program.
    """

    def __init__(self, become: Callable[[wire.Socket], Callable[[], Any]]) -> None:
        self.poll = select.poll()
        self.waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Becomes readable when a child has changed."""
        self.poll.register(self.waking, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self.programs = Programs(self.poll)
        self.spares = Spares(become)

    def start(self, call: Call, channel: wire.Socket, peer: Peer) -> None:
        """Have the spare become a program.

        Args:
            call: of the program.
            channel: the caller's socket, owned by this from now on, unless it raises.
            peer: the caller, likewise.

        Raises:
            OSError: no process can be started.
            Born: in a copy.
        """
        pid = self.spares.hand_over(call, (channel.fileno(), peer.fd))
        self.programs.add(pid, Running(channel, peer))
        self.spares.fork()

    def reap(self) -> list[int]:
        """Learn what has become of children, and tell their callers; return those that ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.waking, 1 << 10)
        ended: list[int] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            self.programs.child_has_changed(pid, status)
            if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
                ended.append(pid)
                self.spares.has_ended(pid)
