"""Connections to a template: who is there, and what it asks.

A process that connects and says nothing, or no message, delays no other.
"""

import contextlib
import errno
import os
import select
import time

from shmload._templates import messages, wire
from shmload._templates.messages import Call, End, Look, Noted, Refused
from shmload._templates.rights import Peer

# Connections that have said nothing yet; the oldest one makes room for another.
_MAX_SILENT = 64
# With no descriptor left, connections wait until a program has ended.
_PAUSE_S = 0.2

Question = Call | Look | Noted | End


class Connections:
    """Accepts connections at a path, and reads what they ask.

    Args:
        path: of the socket; what is there is replaced.
        poll: of the template; told of the descriptors to watch.

    Raises:
        OSError: nothing can be made there.
    """

    def __init__(self, path: str, poll: select.poll) -> None:
        self.path = path
        self._poll = poll
        self._silent: dict[int, Peer] = {}
        self._paused_until = 0.0
        self._listener = wire.open_socket()
        if os.path.lexists(path):
            os.unlink(path)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        poll.register(self._listener.fileno(), select.POLLIN)

    def close_all(self) -> None:
        """Close all sockets, in a copy of the template."""
        self._listener.close()
        for peer in self._silent.values():
            peer.close()

    def move(self, path: str) -> None:
        """Move the socket to another path."""
        os.rename(self.path, path)
        self.path = path

    def wait_s(self) -> float | None:
        """Return in how many seconds `tend` has something to do; None for never."""
        return max(0.0, self._paused_until - time.monotonic()) if self._paused_until else None

    def tend(self) -> None:
        """Listen again after a pause."""
        if self._paused_until and self._paused_until <= time.monotonic():
            self._paused_until = 0.0
            self._poll.register(self._listener.fileno(), select.POLLIN)

    def question_at(self, fd: int) -> tuple[Question, Peer] | None:
        """Return what is asked at a descriptor that can be read, and who asks; None if nothing yet.

        The peer is the calling code's then.
        """
        if fd == self._listener.fileno():
            peer = self._accept()
            return self._read(peer) if peer else None
        return self._read(self._take(fd)) if fd in self._silent else None

    def _accept(self) -> Peer | None:
        try:
            fd, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._poll.unregister(self._listener.fileno())
                self._paused_until = time.monotonic() + _PAUSE_S
            return None  # or the caller has gone
        os.set_inheritable(fd, False)
        try:
            return Peer(wire.take(fd))
        except OSError:  # it has ended
            return None

    def _read(self, peer: Peer) -> tuple[Question, Peer] | None:
        found: tuple[Question, list[int]] | None
        try:
            peer.channel.setblocking(False)
            found = messages.receive(peer.channel, Call, Look, Noted, End)
            peer.channel.setblocking(True)
            if found is not None:
                wire.close(found[1])
                return found[0], peer
        except BlockingIOError:
            self._silent[peer.channel.fileno()] = peer
            self._poll.register(peer.channel.fileno(), select.POLLIN)
            if len(self._silent) > _MAX_SILENT:
                self._take(next(iter(self._silent))).close()
            return None
        except (OSError, ValueError):
            pass  # it has gone, or is no caller of this version
        peer.close()
        return None

    def _take(self, fd: int) -> Peer:
        self._poll.unregister(fd)
        return self._silent.pop(fd)


def refuse(peer: Peer, reason: str, *, is_replaceable: bool = False) -> None:
    """Tell a caller that its program cannot run here, and part; do not wait for it to listen."""
    with contextlib.suppress(OSError):
        messages.send(peer.channel, Refused(reason, int(is_replaceable)), waits=False)
    peer.close()
