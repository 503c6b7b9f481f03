"""Fills pieces of segments from shards.

Guarantee: a piece is either filled to its last byte and digested, or an error says why not. Reads
and writes go through descriptors and never through a mapping of the file: a shard that is cut short
is then a short read and not SIGBUS, and memory that runs out is ENOSPC.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import xxhash

from shmload._checkpoints.dtypes import unit_nbytes
from shmload._host.reading import READ_NBYTES
from shmload._segments.pieces import Run
from shmload.workers.messages import Reason
from shmload.workers.reader import FillError, Readable, Reader

if TYPE_CHECKING:
    from shmload.workers.convert import Converter

# Often enough for a progress bar, also with a slow disk. Each report takes the parent some time on
# a core that decodes.
_REPORT_INTERVAL_S = 0.1

Report = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""


class Filler:
    """Fills pieces through buffers that it owns; one per worker, and not for several threads."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._target = memoryview(bytearray(READ_NBYTES))
        self._converters: dict[tuple[str, str], Converter] = {}

    def close(self) -> None:
        """End the threads that read; a second call is fine."""
        self._reader.close()

    def fill(
        self,
        shard: Readable,
        target: int,
        runs: Iterable[Run],
        report: Report,
    ) -> bytes:
        """Fill one piece.

        Args:
            shard: from `examine`.
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
        report_at = 0.0  # at once after the first run: the piece has begun
        cut = list(_cut(runs))
        views = self._reader.read(shard, cut, lambda: report(0))
        with contextlib.closing(views):
            for run, read in zip(cut, views, strict=True):
                written = self._convert(run, read)
                digest.update(written)
                _write(target, written, run.target_offset)
                pending += len(read)
                if pending >= READ_NBYTES and time.monotonic() > report_at:
                    report(pending)
                    pending = 0
                    report_at = time.monotonic() + _REPORT_INTERVAL_S
        if pending:
            report(pending)
        return digest.digest()

    def _convert(self, run: Run, read: memoryview) -> memoryview:
        if run.source == run.target:
            return read
        key = (run.source, run.target)
        if key not in self._converters:
            # Not at the top: numpy takes half of a worker's start, and many loads convert nothing.
            import numpy  # noqa: F401 first: ml_dtypes would hide that there is no memory for it

            from shmload.workers.convert import make_converter

            self._converters[key] = make_converter(*key, READ_NBYTES)
        written = self._target[: run.target_nbytes]
        self._converters[key](read, written, run.count)
        return written


def _cut(runs: Iterable[Run]) -> Iterator[Run]:
    """Cut runs so that they end where a read of `READ_NBYTES` of the shard does.

    So a read past the page cache takes no more pages than there are bytes for. What is read at a
    time is converted at a time: on an EPYC 9004 with 1 MiB of level-2 cache, read, fp32 to bf16,
    digest and write of 64 KiB reach 2.2 GB/s, 256 KiB 2.4, 1 MiB 2.6, 4 MiB 2.6.
    """
    for offset, target, elements, *kind in map(msgspec.structs.astuple, runs):
        source_nbytes, target_nbytes = unit_nbytes(*kind)
        most = READ_NBYTES // max(source_nbytes, target_nbytes)
        while elements:
            room = (READ_NBYTES - offset % READ_NBYTES) // source_nbytes
            # An element may lie across the boundary.
            count = min(most, max(1, room), elements)
            yield Run(offset, target, count, *kind)
            offset += count * source_nbytes
            target += count * target_nbytes
            elements -= count


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
