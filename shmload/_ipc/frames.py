"""Typed messages over a Unix socket, with descriptors.

A frame is a 4-byte big-endian length and that many bytes of MessagePack: one `msgspec.Struct`,
tagged by its class's name. Who says what is in `workers.messages`, `_service.protocol` and
`integrations._jobs.messages`.

Guarantee: nothing is unpickled, every length has a limit, and a frame that is no message is a
`ProtocolError`.
"""

import os
import socket
from typing import Any, Generic, TypeVar

import msgspec

from shmload.errors import ProtocolError

# Far above any piece of a real checkpoint; a frame that claims more is garbage.
_MAX_FRAME_NBYTES = 64 << 20
_LENGTH_NBYTES = 4
# A frame comes with two at most, and those of the next may be there already.
_MAX_FDS = 16


_M = TypeVar("_M")

_ENCODER = msgspec.msgpack.Encoder()


def to_frame(message: msgspec.Struct) -> bytes:
    """Return a message as it goes over a socket."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(_LENGTH_NBYTES, "big") + body


def take_channel(fd: int) -> socket.socket:
    """Take up a socket that another process has made for this one; it blocks.

    Neither that process's default timeout nor this one's holds for it.
    """
    channel = socket.socket(fileno=fd)
    channel.settimeout(None)
    return channel


def send(channel: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    """Send one message, descriptors with it; blocks until the socket takes it.

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
            ProtocolError: it is none of this version.
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
        channel: stays the caller's.
        max_frame_nbytes: what claims to be longer is garbage, in bytes.
    """

    def __init__(self, channel: socket.socket, max_frame_nbytes: int = _MAX_FRAME_NBYTES) -> None:
        self._channel = channel
        self._max_frame_nbytes = max_frame_nbytes
        self._buffer = bytearray()
        self.fds: list[int] = []
        """Descriptors that came and nobody has taken yet; the taker closes them."""

    def receive(self) -> bool:
        """Read what is there, waiting if nothing is; False at the end of file.

        Raises:
            ProtocolError: descriptors pile up that no frame takes, or some were lost.
        """
        try:
            received, fds, flags, _ = socket.recv_fds(
                self._channel, 1 << 18, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        self.fds.extend(fds)
        self._buffer += received
        # The kernel drops what there is no place for, here or in this process.
        if flags & socket.MSG_CTRUNC or len(self.fds) > _MAX_FDS:
            raise ProtocolError(
                "there came more descriptors than messages or this process can take"
            )
        return bool(received)

    @property
    def is_empty(self) -> bool:
        """Whether no frame has begun to arrive."""
        return not self._buffer

    def close(self) -> None:
        """Close the descriptors that nobody has taken."""
        while self.fds:
            os.close(self.fds.pop())

    def next_frame(self) -> bytes | None:
        """Take the next complete frame, or None if it is not there yet.

        Raises:
            ProtocolError: the frame claims an absurd length.
        """
        if len(self._buffer) < _LENGTH_NBYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_NBYTES], "big")
        if length > self._max_frame_nbytes:
            raise ProtocolError(f"a frame claims {length} bytes; the peer is not a shmload process")
        if len(self._buffer) < _LENGTH_NBYTES + length:
            return None
        with memoryview(self._buffer) as view:  # a slice of the buffer itself would be a copy more
            frame = bytes(view[_LENGTH_NBYTES : _LENGTH_NBYTES + length])
        del self._buffer[: _LENGTH_NBYTES + length]
        return frame
