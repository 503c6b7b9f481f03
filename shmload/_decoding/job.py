"""A shard to decode: what is read where to, and what can go wrong with it."""

import os
from collections.abc import Callable

import msgspec

from shmload._checkpoints.header import truncated
from shmload._checkpoints.identity import Stat
from shmload._host.files import unreadable
from shmload._host.limits import is_lack_of_memory, no_memory
from shmload._host.shm import no_room, shm_free_nbytes
from shmload._segments.pieces import Run, combine_digests
from shmload.errors import (
    ShardChanged,
    ShmloadError,
    WorkerError,
)
from shmload.workers.messages import Reason

OnBytes = Callable[[int], None]
"""Called with the number of bytes newly read, from the thread that decodes."""
OnPiece = Callable[..., None]
"""Called with the numbers of a job and of its piece that is complete, in the same thread; also with
the id of the worker's process, if one has filled it, and the time at which it began."""


class DecodeCancelled(Exception):
    """A decode was cancelled by its caller; the parts are not complete."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A shard to decode into a part; the caller owns the descriptors."""

    path: str | os.PathLike[str]
    source_fd: int
    source: Stat
    """The shard's fstat when the load was planned."""
    part_fd: int
    nbytes: int
    """Size of the segment, in bytes."""
    pieces: tuple[tuple[Run, ...], ...]
    """As `Layout` has them."""

    @property
    def read_nbytes(self) -> int:
        """Number of bytes to read from the shard."""
        return sum(run.source_nbytes for piece in self.pieces for run in piece)


def decode_here(
    job: Job,
    on_bytes: OnBytes,
    is_cancelled: Callable[[], bool],
    on_piece: Callable[[int], None] = lambda piece: None,
) -> str:
    """Fill a job's part in the caller's thread; return the digest of its segment.

    Raises:
        CheckpointError, CapacityError: as `coordinator.decode`.
        DecodeCancelled: `is_cancelled` was true before the end.
    """
    # Imported here: a parent with workers never needs the conversions.
    from shmload.workers.fill import Filler
    from shmload.workers.reader import FillError, examine_source

    filler, source = Filler(), examine_source(job.source_fd, 1)
    try:
        digests = []
        for piece, runs in enumerate(job.pieces):
            if is_cancelled():
                raise DecodeCancelled
            digests.append(filler.fill(source, job.part_fd, runs, on_bytes))
            on_piece(piece)
        return combine_digests(digests)
    except FillError as exc:
        raise error_of(job, exc.reason, str(exc), exc.offset) from exc
    except (MemoryError, ImportError, OSError) as exc:
        if not is_lack_of_memory(exc):
            raise
        raise no_memory(job.path) from exc
    finally:
        filler.close()
        source.close_direct()


def error_of(job: Job, reason: Reason, detail: str, offset: int) -> ShmloadError:
    """Return the error for a piece of a job that could not be filled.

    Args:
        job: the job.
        reason: what went wrong.
        detail: what the kernel or the worker says of it.
        offset: where in the shard, in bytes.
    """
    match reason:
        case Reason.TRUNCATED:
            return truncated(job.path, job.source.st_size, offset)
        case Reason.READ_ERROR:
            return unreadable(job.path, detail)
        case Reason.CHANGED:
            return changed(job.path)
        case Reason.NO_SPACE:
            return no_room(
                job.nbytes,
                shm_free_nbytes(),
                "/dev/shm",
                "another process took the room; free some with `shmload rm` or enlarge it",
            )
        case Reason.NO_MEMORY:
            return no_memory(job.path)
        case Reason.INTERNAL:
            text = f"a worker failed while it decoded {job.path}; please report this"
            error = WorkerError(text, path=job.path)
            error.add_note(detail)
            return error


def changed(path: str | os.PathLike[str]) -> ShardChanged:
    """Return the error for a shard that has changed while it was decoded."""
    return ShardChanged(
        f"{path} changed while it was read; load again when no process writes to it", path=path
    )
