"""Packets of a Unix socket, with descriptors.

Guarantee: nothing is unpickled, a packet has a limit, and it arrives whole or not at all. What the
packets say is in `messages`.

Everything that starts a program imports this first, so it imports little: not `socket`, which takes
longer than all that a caller does.
"""

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Socket = _socket.socket

MAX_FDS = 250
"""Descriptors that one packet can carry; the kernel's limit is 253."""
MAX_NBYTES = 1 << 20

_FD_NBYTES = 4
_PEER_NBYTES = 12


def connect(path: str, timeout_s: float) -> "Socket":
    """Return a socket that is connected to a template.

    Args:
        path: of the template's socket.
        timeout_s: how long this, and each step of what comes, may take.

    Raises:
        OSError: there is none, or it does not answer.
    """
    channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    channel.settimeout(timeout_s)
    try:
        channel.connect(path)
    except BaseException:
        channel.close()
        raise
    return channel


def send(channel: "Socket", raw: bytes, fds: "Sequence[int]" = (), *, waits: bool = True) -> None:
    """Send bytes and descriptors, as one packet.

    Args:
        channel: where to.
        raw: the bytes; none are the end.
        fds: the descriptors; they stay this process's too.
        waits: until there is room for it, within the socket's timeout.

    Raises:
        OSError: the other side is gone, or the packet is larger than the kernel takes.
    """
    rights = b"".join(fd.to_bytes(_FD_NBYTES, "little") for fd in fds)
    control = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else []
    channel.sendmsg([raw], control, 0 if waits else _socket.MSG_DONTWAIT)


def receive(channel: "Socket") -> bytes:
    """Return the next packet, without descriptors; none at the end.

    Raises:
        OSError: nothing came in the socket's timeout.
    """
    try:
        return channel.recv(MAX_NBYTES)
    except ConnectionResetError:
        # The other end was closed with something unread. What it sent before still comes.
        return receive(channel)


def close_others(kept: "Collection[int]", first: int = 0) -> None:
    """Close the descriptors from the first one on, but for these, which are not below it."""
    for low, high in zip([first - 1, *sorted(kept)], [*sorted(kept), 1 << 20], strict=True):
        os.closerange(low + 1, high)


def peer_of(channel: "Socket") -> tuple[int, int]:
    """Return process and user of the other side, as when it connected or began to listen."""
    raw = channel.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER_NBYTES)
    process, user = (int.from_bytes(raw[at : at + 4], "little", signed=True) for at in (0, 4))
    return process, user
