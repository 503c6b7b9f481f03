"""How far a decode may be ahead of what takes its bytes, so that the host holds only a part.

Weights that all go to accelerators need not be on the host together. Workers fill parts as ever;
what has been copied is freed, and allows as much to be decoded.
"""

import contextlib
import os
import threading
from typing import NamedTuple

from shmload._host.memory import PAGE_NBYTES
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError

# Large enough for the reads that a worker has under way at a time, which are of one piece.
_PIECE_NBYTES = 16 << 20
# For each worker: one that it fills, one that waits in its socket, one that is copied.
_PIECES_OF_A_WORKER = 3
_LEAST_NBYTES = 8 * PAGE_NBYTES


class Bound(NamedTuple):
    """How much memory of the host a load may take for weights on their way to devices."""

    piece_nbytes: int
    """Size of the pieces to decode in, in bytes; whole pages."""
    ahead_nbytes: int
    """How many bytes may be decoded and not copied yet."""
    limit_nbytes: int | None
    """What the caller allows for these and for the slots, in bytes; None if the caller does not
    mind."""


def bound_of(workers: int, limit_nbytes: int | None = None) -> Bound:
    """Choose the size of pieces, and how many bytes may wait to be copied.

    Args:
        workers: number of processes that decode.
        limit_nbytes: as in `Bound`; half of it is left for slots.

    Raises:
        ArgumentError: the limit is below eight pages.
    """
    pieces = _PIECES_OF_A_WORKER * workers
    if limit_nbytes is None or limit_nbytes >= 2 * pieces * _PIECE_NBYTES:
        return Bound(_PIECE_NBYTES, pieces * _PIECE_NBYTES, limit_nbytes)
    if limit_nbytes < _LEAST_NBYTES:
        raise ArgumentError(
            f"{format_nbytes(limit_nbytes)} of host memory is too little; allow some MiB"
        )
    # Prefer fewer pieces to smaller ones: each has a fixed cost.
    ahead_nbytes = limit_nbytes // 2
    pieces = max(2, min(pieces, ahead_nbytes // (_PIECE_NBYTES // 4)))
    return Bound(ahead_nbytes // pieces // PAGE_NBYTES * PAGE_NBYTES, ahead_nbytes, limit_nbytes)


class Allowance:
    """Bytes that may be decoded before others are copied; for two threads.

    Args:
        nbytes: how many may wait; a single piece always may.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes: float = nbytes
        self._taken = 0
        self._lock = threading.Lock()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Becomes readable when more may be decoded."""

    def take(self, nbytes: int) -> bool:
        """Take bytes for a piece that is to be decoded; return whether they are allowed."""
        with self._lock:
            fits = not self._taken or self._taken + nbytes <= self._nbytes
            self._taken += nbytes if fits else 0
            return fits

    def give_back(self, nbytes: int) -> None:
        """Give back the bytes of a piece that was copied, or will not be decoded."""
        with self._lock:
            self._taken -= nbytes
        os.eventfd_write(self.wake_fd, 1)

    def lift(self) -> None:
        """Allow all from here on."""
        with self._lock:
            self._nbytes = float("inf")
        os.eventfd_write(self.wake_fd, 1)

    def rest(self) -> None:
        """Reset `wake_fd`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def close(self) -> None:
        """Close the descriptor; a second call is fine."""
        fd, self.wake_fd = self.wake_fd, -1
        if fd >= 0:
            os.close(fd)
