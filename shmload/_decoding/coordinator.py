"""A set of worker processes that decode jobs, one call after the other.

Guarantee: `decode` returns when every piece is complete, or raises a typed error within a deadline,
even if a worker dies, stops, stalls or sends rubbish. A piece whose worker is lost is tried once
more on another.
"""

import contextlib
import functools
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence

from shmload._checkpoints.identity import is_unchanged
from shmload._decoding.handout import Handout
from shmload._decoding.job import Job, OnBytes, OnPiece, decode_here
from shmload._decoding.ring import Ring
from shmload._decoding.worker_process import WorkerProcess
from shmload._settings import settings
from shmload.errors import ProtocolError, ShardChanged, WorkerFailed


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
    def is_intact(self) -> bool:
        """Whether all workers are alive."""
        return not self._ended_fds()

    def ended(self) -> list[tuple[int, str]]:
        """Return the process ids of the workers that have ended, and how, such as `SIGKILL`."""
        fds = self._ended_fds()
        return [
            (each.child.pid, each.child.how_it_ended())
            for each in self._workers
            if each.child.pidfd in fds
        ]

    def _ended_fds(self) -> set[int]:
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.child.pidfd, select.POLLIN)
        return {fd for fd, _ in poll.poll(0)}

    @property
    def workers(self) -> int:
        """Number of worker processes; zero if it decodes in the caller's thread."""
        return len(self._workers)

    def silent_workers(self, timeout_s: float) -> int:
        """Ask all workers for a sign of life; not while a `decode` runs.

        Args:
            timeout_s: how long to wait for the answers.

        Returns:
            The number of workers that did not answer: they are starting, stopped or dead.
        """
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.ping()
        awaited = {worker.channel.fileno(): worker for worker in self._workers}
        poll = select.poll()
        for fd in awaited:
            poll.register(fd, select.POLLIN)
        while awaited and (left_s := deadline - time.monotonic()) > 0:
            for fd, events in poll.poll(left_s * 1000):
                worker = awaited[fd]
                with contextlib.suppress(ProtocolError, WorkerFailed, OSError):
                    deque(worker.receive(), maxlen=0)
                if not worker.owes_pong or events & select.POLLHUP:
                    poll.unregister(fd)
                    del awaited[fd]
        return sum(worker.owes_pong for worker in self._workers)

    def decode(
        self,
        jobs: Sequence[Job],
        on_bytes: OnBytes,
        is_cancelled: Callable[[], bool] = bool,
        ring: Ring | None = None,
        stall_timeout_s: float | None = None,
        on_piece: OnPiece = lambda job, piece: None,
    ) -> list[str]:
        """Fill all parts; blocks until they are complete.

        Args:
            jobs: what to decode. The parts already have their final length and header.
            on_bytes: called with bytes newly read.
            is_cancelled: called several times a second; when true, the decode ends.
            ring: if given, pieces go to its slots instead of the parts, each when a slot is free.
                Needs workers, and no piece may be larger than a slot.
            stall_timeout_s: how long a worker may make no progress, in seconds; None for what the
                settings say.
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
            if stall_timeout_s is None:
                stall_timeout_s = settings().stall_timeout_s
            handout = Handout(self._workers, jobs, on_bytes, ring, stall_timeout_s, on_piece)
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
