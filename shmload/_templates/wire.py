"""Packets of a Unix socket, with descriptors: values of known kinds, as bytes.

Each value is its length, a colon, and its bytes; a list is its items, a message its fields. What
kind a value has, the reader knows beforehand.

Guarantee: nothing is unpickled, a packet has a limit, and bytes that are no value of the wanted
kind are a `NotUnderstood`. A packet arrives whole or not at all. What the packets say is in
`messages`.

Not `marshal`: it is for trusted bytes, and a process that one has confined under the same user id
may listen at a socket, or be a program that has dropped its rights.

Everything that starts a program imports this first, so it imports little: not `socket` and `json`,
which take longer than all that a caller does.
"""

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

Socket = _socket.socket

MAX_FDS = 250
"""Descriptors that one packet can carry; the kernel's limit is 253."""

_MAX_NBYTES = 1 << 20
_MAX_DIGITS = 7
_FD_NBYTES = 4
_PEER_NBYTES = 12


class NotUnderstood(ValueError):
    """What came is no value, or no message; str says why."""


# Values -----------------------------------------------------------------------------------------


def pack(value: "Any") -> bytes:
    """Return the bytes of a value: an int, str or bytes, or a list of values, or a message."""
    match value:
        case int():
            return b"%d" % value
        case str():  # names of files and variables may be no UTF-8; they cross unchanged
            return value.encode("utf-8", "surrogateescape")
        case bytes():
            return value
    return b"".join(b"%d:%b" % (len(item), item) for item in map(pack, value))


def unpack(raw: bytes, kind: "Any") -> "Any":
    """Return the value that these bytes are.

    Args:
        raw: the bytes.
        kind: of the value: int, str, bytes, a message's class, or a list of one of these.

    Raises:
        ValueError: they are no such value.
    """
    if kind is str:
        return raw.decode("utf-8", "surrogateescape")
    if kind in (int, bytes):
        return kind(raw)
    items = split(raw)
    if hasattr(kind, "__args__"):  # list[...]
        return [unpack(item, kind.__args__[0]) for item in items]
    fields = kind.__annotations__.values()
    if len(items) != len(fields):
        raise NotUnderstood(f"{kind.__name__} has {len(fields)} fields, not {len(items)}")
    return kind(*map(unpack, items, fields))


def split(raw: bytes) -> list[bytes]:
    """Return the bytes of each item of a list, or of each field of a message.

    Raises:
        NotUnderstood: they are neither.
    """
    items, at = [], 0
    while at < len(raw):
        start = raw.find(b":", at, at + _MAX_DIGITS + 1) + 1
        if not start or not raw[at : start - 1].isdigit():
            raise NotUnderstood("a packet holds no value")
        at = start + int(raw[at : start - 1])
        items.append(raw[start:at])
    if at != len(raw):
        raise NotUnderstood("a packet was cut off")
    return items


# Sockets ----------------------------------------------------------------------------------------


def open_socket() -> "Socket":
    """Return a new socket for packets, of the kind that all of these use."""
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


def connect(path: str, timeout_s: float) -> "Socket":
    """Return a socket that is connected to a template.

    Args:
        path: of the template's socket.
        timeout_s: how long this, and each step of what comes, may take.

    Raises:
        OSError: there is none, or it does not answer.
    """
    channel = open_socket()
    channel.settimeout(timeout_s)
    try:
        channel.connect(path)
    except BaseException:
        channel.close()
        raise
    return channel


def take(fd: int) -> "Socket":
    """Return the socket of a descriptor, which it owns from now on."""
    return _socket.socket(fileno=fd)


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


def receive(channel: "Socket") -> tuple[bytes, list[int]] | None:
    """Return the next packet and its descriptors, which are the caller's; None at the end.

    Raises:
        OSError: nothing came in the socket's timeout.
        NotUnderstood: it is longer than any message, or descriptors were lost.
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
    if raw and not flags & (_socket.MSG_CTRUNC | _socket.MSG_TRUNC):
        return raw, fds
    close(fds)
    if raw:
        raise NotUnderstood("a packet was cut off, or descriptors of it were lost")
    return None


def close(fds: "Sequence[int]") -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def close_others(kept: "Collection[int]", first: int = 0) -> None:
    """Close the descriptors from the first one on, but for these, which are not below it."""
    for low, high in zip([first - 1, *sorted(kept)], [*sorted(kept), 1 << 20], strict=True):
        os.closerange(low + 1, high)


def peer_of(channel: "Socket") -> tuple[int, int]:
    """Return process and user of the other side, as when it connected or began to listen."""
    raw = channel.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER_NBYTES)
    process, user = (int.from_bytes(raw[at : at + 4], "little", signed=True) for at in (0, 4))
    return process, user
