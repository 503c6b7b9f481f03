"""Typed messages over a Unix socket, with descriptors.

A frame is a 4-byte big-endian length and that many bytes of MessagePack: one `msgspec.Struct`,
tagged by its class's name. `workers.messages` has what each side sends.

Guarantee: nothing is unpickled, every length has a limit, and a frame that is no message is a
`ProtocolError`.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from shmload.errors import ProtocolError

# Far above any piece of a real checkpoint; a frame that claims more is garbage.
_MAX_FRAME_NBYTES = 64 << 20
_LENGTH_NBYTES = 4
# A frame has at most two, and those of later frames may arrive with it.
_MAX_FDS = 16


_M = TypeVar("_M")

_ENCODER = msgspec.msgpack.Encoder()


def to_frame(message: msgspec.Struct) -> bytes:
    """Return a message's bytes on the wire."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(_LENGTH_NBYTES, "big") + body


def take_channel(fd: int) -> socket.socket:
    """Wrap a socket that the parent made for this process, as a blocking one.

    The default timeouts of both processes are overridden.
    """
    channel = socket.socket(fileno=fd)
    channel.settimeout(None)
    return channel


def serve_parent(serve: Callable[[socket.socket, int], None]) -> None:
    """Be a child that `procs.start` has started with a channel, until the parent is gone.

    Ctrl-C goes to the whole foreground group; the parent decides what it means.

    Args:
        serve: gets the channel, and a pidfd of the parent, which alone tells that it was killed
            while a forked child of it still holds the socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel_fd, parent = map(int, sys.argv[-2:])
    channel = take_channel(channel_fd)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() == parent:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # during an answer
            serve(channel, parent_fd)


def send(channel: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    """Send one message and its descriptors; blocks until the socket takes all of it.

    Raises:
        OSError: the other side is gone, or the socket's timeout passed.
    """
    frame = to_frame(message)
    sent = socket.send_fds(channel, [frame], fds) if fds else 0
    channel.sendall(memoryview(frame)[sent:])


class MessageReader(Generic[_M]):
    """Decodes the frames that one side of a protocol sends; call it with a frame.

    Args:
        kinds: the messages, a union of Structs.
        sender: who sends them, for the error.
        remedy: what helps against messages of another version, for the error.
    """

    def __init__(self, kinds: Any, sender: str, remedy: str = "") -> None:
        self._decoder: msgspec.msgpack.Decoder[_M] = msgspec.msgpack.Decoder(kinds)
        self._sender = sender
        self._remedy = f"; {remedy}" if remedy else ""

    def __call__(self, frame: bytes) -> _M:
        """Return the message in a frame.

        Raises:
            ProtocolError: it is not a message of this version.
        """
        try:
            return self._decoder.decode(frame)
        except (ValueError, RecursionError) as exc:
            raise ProtocolError(
                f"{self._sender} sent a message that this version does not know: {exc}"
                + self._remedy
            ) from exc


class Inbox:
    """Collects the frames that arrive on one socket.

    Args:
        channel: the socket; the caller owns it.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = bytearray()
        self.fds: list[int] = []
        """Descriptors that have arrived; a caller that takes one closes it."""

    def receive(self) -> bool:
        """Read what has arrived; wait if nothing has. Return False at the end of file.

        Raises:
            ProtocolError: more descriptors came than frames can take, or some were lost.
        """
        try:
            received, fds, flags, _ = socket.recv_fds(
                self._channel, 1 << 18, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        self.fds.extend(fds)
        self._buffer += received
        # The kernel drops descriptors that exceed `_MAX_FDS` or the limit of this process.
        if flags & socket.MSG_CTRUNC or len(self.fds) > _MAX_FDS:
            raise ProtocolError(
                "more descriptors arrived than the messages name or this process can open"
            )
        return bool(received)

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self.fds:
            os.close(self.fds.pop())

    def next_frame(self) -> bytes | None:
        """Take the next frame, or return None if it is not complete yet.

        Raises:
            ProtocolError: the frame is longer than any that is sent.
        """
        if len(self._buffer) < _LENGTH_NBYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_NBYTES], "big")
        if length > _MAX_FRAME_NBYTES:
            raise ProtocolError(f"a frame claims {length} bytes; the peer is not a shmload process")
        if len(self._buffer) < _LENGTH_NBYTES + length:
            return None
        with memoryview(self._buffer) as view:  # slicing the bytearray would copy twice
            frame = bytes(view[_LENGTH_NBYTES : _LENGTH_NBYTES + length])
        del self._buffer[: _LENGTH_NBYTES + length]
        return frame
