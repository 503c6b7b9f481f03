"""Connections to a template: who is there, and what it asks.

A process that connects and says nothing, or is not one that a template may serve, delays no other.
"""

import errno
import os
import select
import time
from dataclasses import dataclass

from shmload._templates import messages, wire
from shmload._templates.messages import Call, End, Keep, Look, Noted, Refused
from shmload._templates.rights import Peer, PeerDiffers, rights_of

_SILENCE_TIMEOUT_S = 5.0
# With no descriptor left, connections wait until a program has ended.
_PAUSE_S = 0.2
_MAX_SILENT = 64


@dataclass(frozen=True, slots=True)
class Question:
    """What a process asks, with its socket and itself; the calling code owns both."""

    message: Call | Look | Keep | Noted | End
    channel: wire.Socket
    peer: Peer

    def close(self) -> None:
        """Part from the process."""
        self.channel.close()
        self.peer.close()


@dataclass(frozen=True, slots=True)
class _Silent:
    channel: wire.Socket
    peer: Peer
    deadline: float


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
        self._own = rights_of()
        self._silent: dict[int, _Silent] = {}
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
        for silent in self._silent.values():
            silent.channel.close()
            silent.peer.close()

    def move(self, path: str) -> None:
        """Move the socket to another path."""
        os.rename(self.path, path)
        self.path = path

    def wait_s(self) -> float | None:
        """Return in how many seconds `tend` has something to do; None for never."""
        times = [silent.deadline for silent in self._silent.values()]
        times += [self._paused_until] if self._paused_until else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def tend(self) -> None:
        """Close connections that say nothing; listen again after a pause."""
        now = time.monotonic()
        for fd, silent in list(self._silent.items()):
            if silent.deadline <= now:
                self._take(fd)
                silent.channel.close()
                silent.peer.close()
        if self._paused_until and self._paused_until <= now:
            self._paused_until = 0.0
            self._poll.register(self._listener.fileno(), select.POLLIN)

    def question_at(self, fd: int) -> Question | None:
        """Return what is asked at a descriptor that can be read; None if nothing is yet."""
        if fd == self._listener.fileno():
            accepted = self._accept()
            return self._read(accepted) if accepted else None
        return self._read(self._take(fd)) if fd in self._silent else None

    def _accept(self) -> _Silent | None:
        try:
            fd, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._poll.unregister(self._listener.fileno())
                self._paused_until = time.monotonic() + _PAUSE_S
            return None  # or the caller has gone
        channel = wire.take(fd)
        os.set_inheritable(fd, False)
        try:
            peer = Peer(channel)
        except OSError:  # it has ended
            channel.close()
            return None
        return _Silent(channel, peer, time.monotonic() + _SILENCE_TIMEOUT_S)

    def _read(self, silent: _Silent) -> Question | None:
        channel, peer = silent.channel, silent.peer
        question = None
        try:
            channel.setblocking(False)
            found: tuple[Call | Look | Keep | Noted | End, list[int]] | None
            found = messages.receive(channel, Call, Look, Keep, Noted, End)
            channel.setblocking(True)
            if found is not None:
                wire.close(found[1])
                if peer.user != os.geteuid():
                    raise PeerDiffers("it is another user's")
                if isinstance(found[0], Call | Noted):  # both say what is to run here
                    peer.require_equal(self._own)
                question = Question(found[0], channel, peer)
        except BlockingIOError:
            if len(self._silent) < _MAX_SILENT:
                self._silent[channel.fileno()] = silent
                self._poll.register(channel.fileno(), select.POLLIN)
                return None
        except PeerDiffers as exc:
            refuse(channel, f"this process may not use the template: {exc}")
        except (OSError, ValueError):
            pass  # it has gone, or is no caller of this version
        if question is None:
            channel.close()
            peer.close()
        return question

    def _take(self, fd: int) -> _Silent:
        self._poll.unregister(fd)
        return self._silent.pop(fd)


def refuse(channel: wire.Socket, reason: str, *, is_replaceable: bool = False) -> None:
    """Tell a caller that its program cannot run here; do not wait for it to listen."""
    try:
        messages.send(channel, Refused(reason, int(is_replaceable)), waits=False)
    except OSError:
        return
