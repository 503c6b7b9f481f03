"""Connections to a template: who is there, and what it asks.

A process that connects and says nothing, or no message, delays no other.

A process that one has confined under the same user id (fewer capabilities, a filter of system
calls, a label, namespaces, another root) must not get a template that may do more. Its own word
counts for nothing: the template reads of each peer what it has read of itself, and compares.
"""

import _socket
import contextlib
import errno
import os
import select
import time

from shmload._templates import messages, wire
from shmload._templates.kind import has_ended, read_status, rights_of
from shmload._templates.messages import Call, End, Look, Refused

# Connections that have said nothing yet; the oldest one makes room for another.
_MAX_SILENT = 64
# With no descriptor left, connections wait until a program has ended: looked at this often.
_PAUSE_S = 0.2

# Linux 6.5; not in the module socket.
_SO_PEERPIDFD = 77
# Restrictions that say how many they are, but not which; see `_are_of_the_container`.
_NUMBERS = ("NoNewPrivs", "Seccomp", "Seccomp_filters")

Question = Call | Look | End


class Peer:
    """The process at the other end of a socket, held so that its number stays its own.

    Args:
        channel: the socket, on which it has connected; owned by this, also if it raises.

    Raises:
        OSError: it has ended.
    """

    def __init__(self, channel: "wire.Socket") -> None:
        self.channel = channel
        try:
            self.pid, self.user = wire.peer_of(channel)
            try:
                # Of the very process that connected.
                self.fd = channel.getsockopt(_socket.SOL_SOCKET, _SO_PEERPIDFD)
            except OSError:
                self.fd = os.pidfd_open(self.pid)
        except OSError:
            channel.close()
            raise
        os.set_inheritable(self.fd, False)

    def close(self) -> None:
        """Part from it."""
        self.channel.close()
        os.close(self.fd)

    def how_it_differs(self, own: dict[str, object]) -> str:
        """Say why it may not do what this process may do, and no less; empty if it may.

        Args:
            own: `rights_of` this process.
        """
        try:
            found = rights_of(self.pid)
        except OSError as exc:
            return f"what it may do cannot be read: {exc}"
        if has_ended(self.fd):  # what was read may be of another process with its number
            return "it has ended"
        for name, wanted in own.items():
            if found.get(name) != wanted:
                return f"it differs from the template in {name}"
        if not _are_of_the_container(found):
            return "it has a filter of system calls of its own, or no_new_privs"
        return ""


def _are_of_the_container(found: dict[str, object]) -> bool:
    """Tell whether restrictions that cannot be told apart are those of all processes here.

    Two filters of system calls cannot be compared, only counted; Landlock shows in no_new_privs
    only. If the first process has as many, they are the container's.
    """
    own = [found[name] for name in _NUMBERS]
    if own == ["0", "0", "0"] or own == ["0", "0", None]:
        return True
    try:
        first = read_status(1)
    except OSError:
        return False
    return own == [first.get(name) for name in _NUMBERS]


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
                time.sleep(_PAUSE_S)
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
            found = messages.receive(peer.channel, Call, Look, End)
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
