"""What a coordinator and its workers say to each other, and how it is framed.

    coordinator                          worker
        |  <- Ready                         |     once, when it has imported what it needs
        |  Open + two descriptors ->        |     a shard and its part, by SCM_RIGHTS
        |  Fill ->                          |     a piece of it; several may wait in the socket
        |  <- Progress ...                  |     while the piece is being filled
        |  <- Filled | Failed               |     in the order of the Fills
        |  Close ->                         |     forget the descriptors
        |  (end of file)                    |     the worker leaves

A frame is a 4-byte big-endian length and that many bytes of MessagePack. Nothing is unpickled.
"""

import enum
import os
import socket
from typing import Final

import msgspec

from shmload._segments.pieces import Run
from shmload.errors import ProtocolError

VERSION: Final = 1

# Far above any piece of a real checkpoint; a frame that claims more is garbage.
_MAX_FRAME_NBYTES = 64 << 20
_LENGTH_NBYTES = 4
# A frame comes with two at most, and those of the next may be there already.
_MAX_FDS = 16


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has started."""

    version: int
    pid: int


class Open(msgspec.Struct, frozen=True, tag=True):
    """Keep the two descriptors that come with this message: the shard's, then the part's."""

    shard: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close a shard's descriptors."""

    shard: int


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Fill one piece; its runs are in the order of their target offsets, with no gap."""

    shard: int
    piece: int
    runs: tuple[Run, ...]


class Progress(msgspec.Struct, frozen=True, tag=True):
    """So many more bytes have been read."""

    nbytes: int


class Filled(msgspec.Struct, frozen=True, tag=True):
    """A piece is complete."""

    shard: int
    piece: int
    digest: bytes
    """XXH3-128 of the piece's bytes as they stand in the segment."""


class Reason(enum.Enum):
    """Why a piece could not be filled."""

    TRUNCATED = "truncated"
    READ_ERROR = "read error"
    NO_SPACE = "no space"
    INTERNAL = "internal"


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A piece cannot be filled, and no other worker would fare better."""

    shard: int
    piece: int
    reason: Reason
    detail: str
    """The errno's text, or the traceback of an internal failure."""
    offset: int = 0
    """For `TRUNCATED`: how far the shard could be read, in bytes."""


ToWorker = Open | Close | Fill
FromWorker = Ready | Progress | Filled | Failed

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


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


def decode_to_worker(frame: bytes) -> ToWorker:
    """Read a message that a worker gets.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _TO_WORKER.decode(frame)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"a worker got a message it does not know: {exc}") from exc


def decode_from_worker(frame: bytes) -> FromWorker:
    """Read a message that a worker sent.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _FROM_WORKER.decode(frame)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"a worker sent a message that is none: {exc}") from exc
