"""Packets of a Unix socket, with descriptors: values of a few kinds, as bytes.

Guarantee: nothing is unpickled, every length has a limit, and bytes that are no value of these
kinds are a `NotUnderstood`. A packet arrives whole or not at all. What the packets say is in
`messages`.

Everything that starts a program imports this first, so it imports little: not `socket` and `json`,
which take longer than all that a caller does.
"""

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

Socket = _socket.socket

MAX_FDS = 250
"""Descriptors that one packet can carry; the kernel's limit is 253."""

_MAX_NBYTES = 1 << 20
_MAX_DEPTH = 5
_MAX_ITEMS = 1 << 16
_FD_NBYTES = 4
_PEER_NBYTES = 12


class NotUnderstood(ValueError):
    """What came is no value, or no message; str says why."""


# Values -----------------------------------------------------------------------------------------


def encode(value: "Any") -> bytes:
    """Return the bytes of a value: an int, str or bytes, or a list or tuple of values."""
    match value:
        case int():
            return b"i%d;" % value
        case str():
            # Names of files and variables may be no UTF-8; they cross unchanged.
            raw = value.encode("utf-8", "surrogateescape")
            return b"s%d;%b" % (len(raw), raw)
        case bytes():
            return b"b%d;%b" % (len(value), value)
        case list() | tuple():
            return b"l%d;%b" % (len(value), b"".join(map(encode, value)))
    raise TypeError(f"{type(value).__name__} cannot be sent")


def decode(raw: bytes) -> "Any":
    """Return the value that these bytes are; lists come as lists.

    Raises:
        NotUnderstood: they are none, or more than one.
    """
    value, end = _decode_at(raw, 0, _MAX_DEPTH)
    if end != len(raw):
        raise NotUnderstood("a packet has bytes after its end")
    return value


def _decode_at(raw: bytes, start: int, depth: int) -> "tuple[Any, int]":
    """Return the value that begins here, and where it ends."""
    kind, end = raw[start : start + 1], raw.find(b";", start, start + 24)
    digits = raw[start + 1 : end]
    if end < 0 or not digits.removeprefix(b"-").isdigit():
        raise NotUnderstood("a packet holds no value")
    number, end = int(digits), end + 1
    if kind == b"i":
        return number, end
    if kind == b"l" and depth and 0 <= number <= _MAX_ITEMS:
        items = []
        for _ in range(number):
            item, end = _decode_at(raw, end, depth - 1)
            items.append(item)
        return items, end
    content = raw[end : end + number]
    if kind not in (b"s", b"b") or number < 0 or len(content) != number:
        raise NotUnderstood("a packet was cut off, or holds no value")
    return (content.decode("utf-8", "surrogateescape") if kind == b"s" else content), end + number


# Sockets ----------------------------------------------------------------------------------------


def open_socket() -> "Socket":
    """Return a new socket for packets, of the kind that all of these use."""
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


def pair() -> "tuple[Socket, Socket]":
    """Return two such sockets, connected to each other."""
    return _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


def take(fd: int) -> "Socket":
    """Return the socket of a descriptor, which it owns from now on."""
    return _socket.socket(fileno=fd)


def send(channel: "Socket", value: "Any", fds: "Sequence[int]" = (), *, waits: bool = True) -> None:
    """Send a value and descriptors, as one packet.

    Args:
        channel: where to.
        value: see `encode`.
        fds: the descriptors; they stay this process's too.
        waits: until there is room for it, within the socket's timeout.

    Raises:
        OSError: the other side is gone, or the packet is larger than the kernel takes.
    """
    raw = b"".join(fd.to_bytes(_FD_NBYTES, "little") for fd in fds)
    control = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, raw)] if fds else []
    channel.sendmsg([encode(value)], control, 0 if waits else _socket.MSG_DONTWAIT)


def receive(channel: "Socket") -> "tuple[Any, list[int]] | None":
    """Return the next value and its descriptors, which are the caller's; None at the end.

    Raises:
        OSError: nothing came in the socket's timeout.
        NotUnderstood: it is no value, or descriptors were lost.
    """
    try:
        raw, control, flags, _ = channel.recvmsg(
            _MAX_NBYTES, _socket.CMSG_SPACE(MAX_FDS * _FD_NBYTES), _socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        # The other end was closed with something unread. What it sent before still comes.
        return receive(channel)
    fds = [
        int.from_bytes(rights[at : at + _FD_NBYTES], "little")
        for level, kind, rights in control
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
        for at in range(0, len(rights) - len(rights) % _FD_NBYTES, _FD_NBYTES)
    ]
    if not raw:
        close(fds)
        return None
    try:
        if flags & (_socket.MSG_CTRUNC | _socket.MSG_TRUNC):
            raise NotUnderstood("a packet was cut off, or descriptors of it were lost")
        return decode(raw), fds
    except ValueError as exc:
        close(fds)
        raise NotUnderstood(str(exc)) from exc


def close(fds: "Sequence[int]") -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def peer_of(channel: "Socket") -> tuple[int, int, int]:
    """Return process, user and group of the other side, as when it connected or began to listen."""
    raw = channel.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER_NBYTES)
    process, user, group = (
        int.from_bytes(raw[at : at + 4], "little", signed=True) for at in (0, 4, 8)
    )
    return process, user, group
