"""What a coordinator and its workers say to each other.

    coordinator                          worker
        |  <- Ready                         |     once, when it has imported what it needs
        |  Open + two descriptors ->        |     a shard and its part, by SCM_RIGHTS
        |  Fill ->                          |     a piece of it; several may wait in the socket
        |  <- BytesRead ...                 |     while the piece is being filled
        |  <- Filled | Failed               |     in the order of the Fills
        |  (end of file)                    |     the worker leaves

Framed by `_ipc.frames`. Imports nothing heavy: a worker starts in 0.03 s.
"""

import enum
from typing import Final

import msgspec

from shmload._ipc.frames import MessageReader
from shmload._segments.pieces import Run

VERSION: Final = 7
"""To be increased with every change of a message."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has started."""

    version: int
    pid: int


class Open(msgspec.Struct, frozen=True, tag=True):
    """Keep the two descriptors that come with this message: the shard's, then the part's."""

    shard: int
    workers: int
    """How many read at the same time."""


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Fill one piece; its runs are in the order of their target offsets, with no gap."""

    shard: int
    piece: int
    runs: tuple[Run, ...]


class BytesRead(msgspec.Struct, frozen=True, tag=True):
    """This many more bytes have been read."""

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
    CHANGED = "changed"
    NO_SPACE = "no space"
    NO_MEMORY = "no memory"
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


ToWorker = Open | Fill
FromWorker = Ready | BytesRead | Filled | Failed

decode_to_worker = MessageReader[ToWorker](ToWorker, "a coordinator")
decode_from_worker = MessageReader[FromWorker](FromWorker, "a worker")
