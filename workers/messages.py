"""What a coordinator and its workers say to each other.

    coordinator                          worker
        |  <- Ready                         |     once, when it has imported what it needs
        |  Fill ->                          |     a piece; several may wait in the socket. The first
        |                                   |     of a shard has two descriptors, by SCM_RIGHTS
        |  <- BytesRead ...                 |     while the piece is being filled
        |  <- Filled | Failed               |     in the order of the Fills
        |  (end of file)                    |     the worker leaves

Framed by `_host.frames`. Imports nothing heavy: a worker starts in 0.03 s.
"""

import enum
from typing import Final

import msgspec

from shmload._host.frames import MessageReader
from shmload._segments.pieces import Run

VERSION: Final = 9
"""To be increased with every change of a message."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has started."""

    version: int


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Fill one piece; its runs are in the order of their target offsets, with no gap.

    With the first of a shard come two descriptors to keep: the shard's, then the part's.
    """

    shard: int
    piece: int
    runs: tuple[Run, ...]
    workers: int
    """How many read at the same time."""


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


FromWorker = Ready | BytesRead | Filled | Failed

decode_to_worker = MessageReader[Fill](Fill, "a coordinator")
decode_from_worker = MessageReader[FromWorker](FromWorker, "a worker")
