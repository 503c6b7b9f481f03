"""What a caller, a template and a program say to each other: JSON in packets of a Unix socket.

Everything that starts a program imports this first, so it imports little. Nothing is unpickled; a
packet that is no JSON object is a `ValueError`. Text that is not UTF-8 crosses unchanged.
"""

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

MAX_FDS = 250
"""Descriptors that one packet can carry; the kernel's limit is 253."""

_MAX_NBYTES = 1 << 20
_UCRED = struct.Struct("3i")


def open_socket() -> socket.socket:
    """Return a new socket for packets, of the kind that all of these use."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two such sockets, connected to each other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message and its descriptors, as one packet.

    Raises:
        OSError: the other side is gone, or the packet is larger than the kernel takes.
    """
    socket.send_fds(channel, [json.dumps(message).encode()], list(fds))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors, which are the caller's; None at the end.

    Raises:
        OSError: the other side is gone, or nothing came in the socket's timeout.
        ValueError: it is no message.
    """
    try:
        raw, fds, flags, _ = socket.recv_fds(channel, _MAX_NBYTES, MAX_FDS)
    except ConnectionResetError:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    if not raw:
        return None
    try:
        message = json.loads(raw)
        if not isinstance(message, dict) or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ValueError("a packet was cut off, or is no message")
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def peer_of(channel: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the other side, as when it connected or began to listen."""
    raw = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return _UCRED.unpack(raw)


def as_text(raw: bytes) -> str:
    """Return bytes as text of one character each, which JSON carries unchanged."""
    return raw.decode("latin-1")


def as_bytes(text: str) -> bytes:
    """Return the bytes of `as_text`."""
    return text.encode("latin-1")
