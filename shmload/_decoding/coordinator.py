"""A set of worker processes that decode jobs, one call after the other.

Guarantee: `decode` returns when every piece is complete, or raises a typed error within a deadline,
even if a worker dies, stops, stalls or sends rubbish. A piece whose worker is lost is tried once
more on another.
"""

import contextlib
import functools
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence

from shmload._checkpoints.identity import is_unchanged
from shmload._decoding.job import (
    DecodeCancelled,
    Job,
    OnBytes,
    OnPiece,
    decode_here,
    error_of,
    moved,
)
from shmload._decoding.ring import FilledSlot, Ring
from shmload._decoding.worker_process import Task, WorkerProcess
from shmload._host.limits import no_memory
from shmload._segments.pieces import combine_digests
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import (
    ProtocolError,
    ShardChanged,
    ShmloadError,
    WorkerError,
)
from shmload.workers.messages import BytesRead, Failed, Fill, Filled, FromWorker

logger = logger_of(__name__)

# Two pieces wait in each worker's socket, so that it does not idle while the parent's thread waits
# for the interpreter lock (up to 5 ms while the main thread imports).
_QUEUE_DEPTH = 3
_MAX_ATTEMPTS = 2


class Coordinator:
    """A set of worker processes, from here until `close`.

    Args:
        workers: number of processes; they start at once and in parallel. With zero, `decode` works
            in the caller's thread, which is faster for small shards and has no deadline.
    """

    def __init__(self, workers: int) -> None:
        self._workers: list[WorkerProcess] = []
        try:
            for _ in range(workers):
                self._workers.append(WorkerProcess())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all workers; a second call is fine."""
        with contextlib.ExitStack() as closing:
            while self._workers:
                closing.callback(self._workers.pop().close)

    @property
    def workers(self) -> int:
        """Number of worker processes; zero if it decodes in the caller's thread."""
        return len(self._workers)

    def decode(
        self,
        jobs: Sequence[Job],
        on_bytes: OnBytes,
        is_cancelled: Callable[[], bool] = bool,
        ring: Ring | None = None,
        on_piece: OnPiece = lambda job, piece: None,
    ) -> list[str]:
        """Fill all parts; blocks until they are complete.

        Args:
            jobs: what to decode. The parts already have their final length and header.
            on_bytes: called with bytes newly read.
            is_cancelled: called several times a second; when true, the decode ends.
            ring: if given, pieces go to its slots instead of the parts, each when a slot is free.
                Needs workers, and no piece may be larger than a slot.
            on_piece: called with each piece that is complete.

        Returns:
            The digest of each job's segment, in order, as 32 hexadecimal digits.

        Raises:
            CheckpointError: a shard ended early, changed, or could not be read.
            SharedMemoryFull: memory ran out during the decode.
            WorkerError: workers died, stalled or failed.
            DecodeCancelled: `is_cancelled` was true before the end.
        """
        if self._workers:
            handout = _Handout(self._workers, jobs, on_bytes, ring, on_piece)
            digests = handout.run(is_cancelled)
        else:
            digests = [
                decode_here(job, on_bytes, is_cancelled, functools.partial(on_piece, number))
                for number, job in enumerate(jobs)
            ]
        for job in jobs:
            if not is_unchanged(job.source, os.fstat(job.source_fd)):
                raise ShardChanged(job.path)
        return digests


class _Handout:
    """The pieces of one decode: which wait, are with a worker, or are complete.

    A worker that is replaced is replaced in the coordinator's list.
    """

    def __init__(
        self,
        workers: list[WorkerProcess],
        jobs: Sequence[Job],
        on_bytes: OnBytes,
        ring: Ring | None,
        on_piece: OnPiece,
    ) -> None:
        self._workers = workers
        self._stall_timeout_s = settings().stall_timeout_s
        self._ring = ring
        # Slots of pieces handed out, by (shard, piece).
        self._slots: dict[tuple[int, int], int] = {}
        self._jobs = jobs
        self._on_bytes = on_bytes
        self._on_piece = on_piece
        self._waiting = deque(_interleave([len(job.pieces) for job in jobs]))
        self._digests = [[b""] * len(job.pieces) for job in jobs]
        self._left = len(self._waiting)
        self._most_workers = len(workers)
        self._lost_in_a_row = 0
        self._selector = selectors.DefaultSelector()

    def run(self, is_cancelled: Callable[[], bool]) -> list[str]:
        """Hand out all pieces, and watch the workers until all are complete; return the digests.

        Raises:
            CheckpointError, CapacityError, WorkerError, DecodeCancelled: as `Coordinator.decode`.
        """
        with self._selector:
            if self._ring:
                self._selector.register(self._ring.wake_fd, selectors.EVENT_READ)
            for worker in self._workers:
                self._watch(worker)
            while self._left:
                if is_cancelled():
                    raise DecodeCancelled
                for key, _ in self._selector.select(0.1):
                    worker = key.data
                    if worker is None:
                        self._go_on()
                    elif worker in self._workers:
                        self._hear(worker, died=key.fileobj is not worker.channel)
                self._check_deadlines()
            for worker in self._workers:
                for shard in range(len(self._jobs)):
                    worker.forget(shard)
        return [combine_digests(pieces) for pieces in self._digests]

    def _watch(self, worker: WorkerProcess) -> None:
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._selector.register(worker.child.pidfd, selectors.EVENT_READ, worker)
        if worker.is_ready:
            self._feed(worker)

    def _hear(self, worker: WorkerProcess, *, died: bool) -> None:
        try:
            messages = [] if died else list(worker.receive())
        except (ProtocolError, WorkerError, OSError) as exc:
            self._replace(worker, WorkerError(f"a worker broke the protocol: {exc}"))
            return
        for message in messages:
            self._take(worker, message)
        if died:
            how = worker.child.how_it_ended()
            if worker.child.has_exited and worker.lacked_memory:  # so would the next one
                raise no_memory(self._jobs[worker.tasks[0].shard if worker.tasks else 0].path)
            if not worker.is_ready:
                error = worker.start_failure()
                if worker.child.has_exited:  # so would the next one
                    raise error
                self._replace(worker, error, how)
                return
            path = self._jobs[worker.tasks[0].shard].path if worker.tasks else "nothing"
            hint = "; perhaps the kernel ran out of memory, see dmesg" if how == "SIGKILL" else ""
            text = f"a worker died ({how}) while it decoded {path}, twice{hint}"
            self._replace(worker, WorkerError(text, path=path, how=how), how)

    def _take(self, worker: WorkerProcess, message: FromWorker) -> None:
        match message:
            case BytesRead(nbytes):
                self._on_bytes(nbytes)
            case Filled(shard, piece, digest):
                self._digests[shard][piece] = digest
                self._pass_on(shard, piece)
                self._on_piece(shard, piece)
                self._left -= 1
                self._lost_in_a_row = 0
            case Failed(shard, _, reason, detail, offset):
                raise error_of(self._jobs[shard], reason, detail, offset)
        self._feed(worker)

    def _feed(self, worker: WorkerProcess) -> None:
        # With few pieces left, one each, so that the last ones end at the same time.
        depth = _QUEUE_DEPTH if len(self._waiting) > len(self._workers) else 1
        while self._waiting and len(worker.tasks) < depth:
            task = self._waiting[0]
            job = self._jobs[task.shard]
            runs, target_fd = job.pieces[task.piece], job.part_fd
            if self._ring:
                slot = self._ring.take()
                if slot is None:
                    return  # a slot that is given back wakes this thread
                self._slots[task.shard, task.piece] = slot
                runs, target_fd = moved(runs, slot), self._ring.fd
            self._waiting.popleft()
            fill = Fill(task.shard, task.piece, runs)
            try:
                worker.give(task, fill, job.source_fd, target_fd, len(self._workers))
            except OSError:
                return  # it died, as its pidfd will tell; the task is in its list

    def _go_on(self) -> None:
        """Hand out pieces for the slots that are free again."""
        assert self._ring is not None
        self._ring.rest()
        for worker in self._workers:
            if worker.is_ready:
                self._feed(worker)

    def _pass_on(self, shard: int, piece: int) -> None:
        """Pass a filled slot on to the thread that empties it."""
        if self._ring:
            runs = self._jobs[shard].pieces[piece]
            begin = runs[0].target_offset
            end = runs[-1].target_offset + runs[-1].target_nbytes
            slot = self._slots.pop((shard, piece))
            self._ring.filled.put(FilledSlot(shard, begin, end - begin, slot))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if not worker.is_ready and now - worker.active_at > settings().start_timeout_s:
                worker.close()
                raise WorkerError(f"a worker was not ready in {settings().start_timeout_s:g} s")
            is_silent = now - worker.active_at > self._stall_timeout_s
            # Its messages may still be unread if feeding another worker has taken that long.
            if worker.tasks and is_silent and not worker.has_news():
                path = self._jobs[worker.tasks[0].shard].path
                text = (
                    f"no progress on {path} in {self._stall_timeout_s:g} s, twice; check the disk "
                    "it is on or raise SHMLOAD_STALL_TIMEOUT_S"
                )
                self._replace(worker, WorkerError(text, path=path))

    def _replace(self, worker: WorkerProcess, error: ShmloadError, how: str = "") -> None:
        """Replace a broken worker, or raise `error` if its piece was tried before.

        Args:
            worker: the worker.
            error: what is wrong with it.
            how: how its process ended, if it did by itself.
        """
        path = self._jobs[worker.tasks[0].shard].path if worker.tasks else ""
        for fileobj in (worker.channel, worker.child.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fileobj)
        # Only its oldest piece counts as tried; the ones behind it were never begun.
        tasks = [
            task._replace(attempts=task.attempts + (position == 0))
            for position, task in enumerate(worker.tasks)
        ]
        self._workers.remove(worker)
        worker.close()
        for task in worker.tasks:
            if self._ring:  # the worker is dead and no longer writes
                self._ring.give_back(self._slots.pop((task.shard, task.piece)))
        self._lost_in_a_row += 1
        is_hopeless = self._lost_in_a_row >= max(_MAX_ATTEMPTS, self._most_workers)
        if is_hopeless or any(task.attempts >= _MAX_ATTEMPTS for task in tasks):
            raise error
        logger.warning(
            "a worker was lost (%s%s)%s; its pieces go to another",
            type(error).__name__,
            f", {how}" if how else "",
            f" while it decoded {path}" if path else "",
        )
        self._waiting.extendleft(reversed(tasks))
        for other in self._workers:
            if other.is_ready:
                self._feed(other)
        if self._waiting or not self._workers:
            replacement = WorkerProcess()
            self._workers.append(replacement)
            self._watch(replacement)


def _interleave(pieces: Sequence[int]) -> list[Task]:
    """Return a task for each piece, with each shard's pieces spread evenly over the whole list.

    The kernel lets one process at a time write to a file (tmpfs takes the inode's lock), so workers
    should not fill the same part at the same time.

    Args:
        pieces: number of pieces of each shard.
    """
    tasks = [Task(shard, piece, 0) for shard, count in enumerate(pieces) for piece in range(count)]
    return sorted(tasks, key=lambda task: (task.piece + 0.5) / pieces[task.shard])
