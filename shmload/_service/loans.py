"""Checks what a client lends the service.

Guarantee: with a loan that passes, workers read a regular file and write within the length of
another one. So no client can make them wait for ever or fill the memory.
"""

import itertools
import os
import stat

from shmload._checkpoints.dtypes import BLOCKS, FLOATS, NBITS
from shmload._decoding.job import Job
from shmload._host.limits import require_file_size
from shmload._host.linux import is_writable
from shmload._segments.pieces import Run
from shmload.errors import ArgumentError, ShardUnreadable


def require_sound(job: Job) -> None:
    """Check a loan; reads no weights.

    The worker finds out whether the shard still has the length it had when it was planned.

    Raises:
        ShardUnreadable: the shard is not a regular file.
        ProcessLimitExceeded: RLIMIT_FSIZE forbids the service to write the part.
        ArgumentError: the part is not a writable file or has another length than the segment, or
            pieces overlap, are out of order, or reach beyond shard or segment.
    """
    if not stat.S_ISREG(os.fstat(job.source_fd).st_mode):
        raise ShardUnreadable(job.path, "it is not a regular file")
    part = os.fstat(job.part_fd)
    if not stat.S_ISREG(part.st_mode) or not is_writable(job.part_fd):
        raise ArgumentError(f"the part that was lent for {job.path} is no file to write to")
    if part.st_size != job.nbytes:
        raise ArgumentError(
            f"the part that was lent for {job.path} has {part.st_size} bytes, not {job.nbytes}"
        )
    require_file_size(job.path, job.nbytes, "the service")
    if not all(job.pieces):
        raise ArgumentError(f"a piece of {job.path} is empty")
    position = 0
    for run in itertools.chain.from_iterable(job.pieces):
        _require_convertible(run, job.path)
        source_end = run.source_offset + run.source_nbytes
        target_end = run.target_offset + run.target_nbytes
        is_within = source_end <= job.source.st_size and target_end <= job.nbytes
        if run.count < 1 or run.source_offset < 0 or run.target_offset < position or not is_within:
            raise ArgumentError(f"a piece of {job.path} reaches outside: {run}")
        position = target_end


def _require_convertible(run: Run, path: str | os.PathLike[str]) -> None:
    is_copy = run.source == run.target and NBITS.get(run.source, 0) >= 8
    is_float = run.source in FLOATS or run.source in BLOCKS
    if not (is_copy or (is_float and run.target in FLOATS)):
        raise ArgumentError(f"{path}: nothing converts {run.source!r} to {run.target!r}")
