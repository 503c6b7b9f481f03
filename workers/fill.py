"""Fills pieces of segments from shards.

Guarantee: a piece is either filled to its last byte and digested, or an error says why not. Reads
and writes go through descriptors and never through a mapping of the file: a shard that is cut short
is then a short read and not SIGBUS, and memory that runs out is ENOSPC.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import xxhash

from shmload._checkpoints.blocks import BLOCKS, unit_nbytes
from shmload._segments.pieces import Run
from shmload.workers.messages import Reason

if TYPE_CHECKING:
    from shmload.workers.convert import Converter
    from shmload.workers.dequantise import Dequantiser

# Bytes read at a time. Measured on an EPYC 9004 with 1 MiB of level-2 cache, read, fp32 to bf16,
# digest and write: 64 KiB 2.2 GB/s, 256 KiB 2.4, 1 MiB 2.6, 4 MiB 2.6.
_BLOCK_NBYTES = 1 << 20

# Often enough for a progress bar, also with a slow disk. Each report takes the parent some time on
# a core that decodes.
_REPORT_INTERVAL_S = 0.1

Report = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""


class FillError(Exception):
    """A piece cannot be filled.

    Attributes:
        reason: the kind of failure.
        offset: where the shard ends, in bytes, if it ends early.
    """

    def __init__(self, reason: Reason, detail: str, offset: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.offset = offset


class Filler:
    """Fills pieces through buffers that it owns; one per worker, and not for several threads."""

    def __init__(self) -> None:
        self._source = memoryview(bytearray(_BLOCK_NBYTES))
        self._target = memoryview(bytearray(_BLOCK_NBYTES))
        self._converters: dict[tuple[str, str], Converter | Dequantiser] = {}

    def fill(self, source: int, target: int, runs: Iterable[Run], report: Report) -> bytes:
        """Fill one piece.

        Args:
            source: descriptor of the shard.
            target: descriptor of the part.
            runs: by target offset, without gaps.
            report: called now and then; its numbers add up to the bytes that the runs read.

        Returns:
            The XXH3-128 of the piece's bytes in the segment.

        Raises:
            FillError: the shard is too short, the kernel reports an error, or memory ran out.
        """
        digest = xxhash.xxh3_128()
        pending = 0
        report_at = 0.0  # at once after the first block: the piece has begun
        for run in runs:
            source_nbytes, target_nbytes = unit_nbytes(run.source, run.target)
            most = _BLOCK_NBYTES // max(source_nbytes, target_nbytes)
            for first in range(0, run.count, most):
                count = min(most, run.count - first)
                read = self._source[: count * source_nbytes]
                _read(source, read, run.source_offset + first * source_nbytes)
                written = self._convert(run, read, count, target_nbytes)
                digest.update(written)
                _write(target, written, run.target_offset + first * target_nbytes)
                pending += len(read)
                if pending >= _BLOCK_NBYTES and time.monotonic() > report_at:
                    report(pending)
                    pending = 0
                    report_at = time.monotonic() + _REPORT_INTERVAL_S
        if pending:
            report(pending)
        return digest.digest()

    def _convert(self, run: Run, read: memoryview, count: int, target_nbytes: int) -> memoryview:
        if run.source == run.target:
            return read
        key = (run.source, run.target)
        if key not in self._converters:
            self._converters[key] = _make_converter(*key)
        written = self._target[: count * target_nbytes]
        self._converters[key].convert(read, written, count)
        return written


def _make_converter(source: str, target: str) -> "Converter | Dequantiser":
    # Not at the top: numpy takes half of a worker's start, and many loads convert nothing.
    if source in BLOCKS:
        from shmload.workers.dequantise import Dequantiser

        return Dequantiser(source, target)
    from shmload.workers.convert import Converter

    return Converter(source, target, _BLOCK_NBYTES)


def _read(fd: int, buffer: memoryview, offset: int) -> None:
    """Read a whole buffer from an offset."""
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as exc:
            raise FillError(Reason.READ_ERROR, os.strerror(exc.errno or errno.EIO)) from exc
        if got == 0:
            raise FillError(Reason.TRUNCATED, "the file ends early", offset + done)
        done += got


def _write(fd: int, buffer: memoryview, offset: int) -> None:
    """Write a whole buffer at an offset."""
    done = 0
    while done < len(buffer):
        try:
            done += os.pwrite(fd, buffer[done:], offset + done)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise FillError(Reason.NO_SPACE, os.strerror(exc.errno)) from exc
            raise
