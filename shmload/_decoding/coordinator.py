"""Worker processes that decode some jobs.

Guarantee: `decode` returns when every piece is complete, or raises a typed error within a deadline,
even if a worker dies, stops, stalls or sends rubbish. A piece whose worker is lost is tried once
more on another.
"""

import contextlib
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from shmload._decoding.allowance import Allowance
from shmload._decoding.shard import Shard
from shmload._decoding.worker_process import WorkerProcess
from shmload._host.limits import is_lack_of_memory, no_memory
from shmload._host.reading import Reading
from shmload._segments.pieces import Run, combine_digests, range_of
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import ProtocolError, WorkerError
from shmload.workers.messages import BytesRead, Failed, Fill, Filled, FromWorker

logger = logger_of(__name__)

# Two pieces wait in each worker's socket, so that it does not idle while the parent's thread waits
# for the interpreter lock (up to 5 ms while the main thread imports).
_QUEUE_DEPTH = 3


OnBytes = Callable[[int], None]
"""Called with the number of bytes newly read, from the thread that decodes."""
OnPiece = Callable[[Shard, Sequence[Run], int, float], None]
"""Called with a shard and the runs of its piece that is complete, in the same thread; also with the
id of the worker's process, or 0, and the monotonic time at which that began, in seconds."""


class DecodeCancelled(Exception):
    """A decode was cancelled by its caller; the parts are not complete."""


def decode(
    shards: Sequence[Shard],
    workers: int,
    on_bytes: OnBytes,
    is_cancelled: Callable[[], bool],
    on_piece: OnPiece,
    allowance: Allowance | None,
) -> list[str]:
    """Fill the parts of some shards; blocks until they are complete.

    Args:
        shards: what to decode. Their parts already have their final length and header.
        workers: number of processes. With zero it works in the caller's thread, which is faster for
            small shards and has no deadline.
        on_bytes: called with bytes newly read.
        is_cancelled: called several times a second; when true, the decode ends.
        on_piece: called with each piece that is complete.
        allowance: how far the decode may be ahead of what takes its bytes, which is given back from
            there; None for no limit. Needs workers.

    Returns:
        The digest of each shard's segment, in order, as 32 hexadecimal digits.

    Raises:
        CheckpointError: a shard ended early, changed, or could not be read.
        SharedMemoryFull: memory ran out during the decode.
        WorkerError: workers died, stalled or failed.
        DecodeCancelled: `is_cancelled` was true before the end.
    """
    if workers:
        with Coordinator(shards, workers, on_bytes, on_piece, allowance) as coordinator:
            digests = coordinator.run(is_cancelled)
    else:
        digests = [_decode_here(shard, on_bytes, is_cancelled, on_piece) for shard in shards]
    for shard in shards:
        shard.require_unchanged()
    return digests


def _decode_here(
    shard: Shard, on_bytes: OnBytes, is_cancelled: Callable[[], bool], on_piece: OnPiece
) -> str:
    """Fill a shard's part in the caller's thread; return the digest of its segment."""
    # Imported here: a parent with workers never needs the conversions.
    from shmload.workers.fill import Filler
    from shmload.workers.reader import FillError, examine

    filler, readable = Filler(), examine(shard.fd, 1)
    try:
        digests = []
        for runs in shard.layout.pieces:
            if is_cancelled():
                raise DecodeCancelled
            digests.append(filler.fill(readable, _part_fd(shard), runs, on_bytes))
            on_piece(shard, runs, 0, 0.0)
        return combine_digests(digests)
    except FillError as exc:
        raise shard.failure(exc.reason, str(exc), exc.offset) from exc
    except (MemoryError, ImportError, OSError) as exc:
        if not is_lack_of_memory(exc):
            raise
        raise no_memory(shard.shown) from exc
    finally:
        filler.close()
        if isinstance(readable, Reading):
            readable.close()


def _part_fd(shard: Shard) -> int:
    assert shard.part
    return shard.part.fd


class Coordinator:
    """Hands out the pieces of one decode to workers that it has started; a context that ends them.

    Args:
        shards: as for `decode`, and so are the others.
        workers: number of processes; they start at once and in parallel.
        on_bytes: called with bytes.
        on_piece: called with pieces.
        allowance: for pieces that wait.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        workers: int,
        on_bytes: OnBytes,
        on_piece: OnPiece,
        allowance: Allowance | None,
    ) -> None:
        self._stall_timeout_s = settings().stall_timeout_s
        self._allowance = allowance
        self._shards = shards
        self._on_bytes = on_bytes
        self._on_piece = on_piece
        self._waiting = deque(_interleave(shards, workers))
        self._tried = set[Fill]()
        self._digests = [[b""] * len(shard.layout.pieces) for shard in shards]
        self._left = len(self._waiting)
        self._most_workers = workers
        self._lost_in_a_row = 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        try:
            for _ in range(workers):
                self._workers.append(WorkerProcess())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers; a second call is fine."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._selector.close)
            while self._workers:
                closing.callback(self._workers.pop().close)

    def run(self, is_cancelled: Callable[[], bool]) -> list[str]:
        """Hand out all pieces, and watch the workers until all are complete; return the digests.

        Raises:
            CheckpointError, CapacityError, WorkerError, DecodeCancelled: as `decode`.
        """
        if self._allowance:
            self._selector.register(self._allowance.wake_fd, selectors.EVENT_READ)
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
        return [combine_digests(pieces) for pieces in self._digests]

    def _watch(self, worker: WorkerProcess) -> None:
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._selector.register(worker.child.pidfd, selectors.EVENT_READ, worker)

    def _hear(self, worker: WorkerProcess, *, died: bool) -> None:
        messages = iter(()) if died else worker.receive()
        while True:
            try:
                message = next(messages, None)
            except (ProtocolError, WorkerError, OSError) as exc:
                self._replace(worker, f"a worker broke the protocol: {exc}")
                return
            if message is None:
                break
            # Before the next one: if that is rubbish, this piece is filled all the same.
            self._take(worker, message)
        if died:
            how = worker.child.how_it_ended()
            if worker.child.has_exited and worker.lacked_memory:  # so would the next one
                raise no_memory(self._path_of(worker) or self._shards[0].shown)
            if not worker.is_ready and worker.child.has_exited:  # so would the next one
                raise worker.start_failure()
            hint = "perhaps the kernel ran out of memory, see dmesg" if how == "SIGKILL" else ""
            when = "" if worker.is_ready else " before it was ready"
            self._replace(worker, f"a worker died ({how}){when}", hint, how)

    def _path_of(self, worker: WorkerProcess) -> str | os.PathLike[str] | None:
        """Return the shard that a worker reads; None if it has nothing to do."""
        return self._shards[worker.fills[0].shard].shown if worker.fills else None

    def _take(self, worker: WorkerProcess, message: FromWorker) -> None:
        match message:
            case BytesRead(nbytes):
                self._on_bytes(nbytes)
            case Filled(number, piece, digest):
                self._digests[number][piece] = digest
                shard = self._shards[number]
                runs = shard.layout.pieces[piece]
                self._on_piece(shard, runs, worker.child.pid, worker.began_at)
                worker.began_at = time.monotonic()
                self._left -= 1
                self._lost_in_a_row = 0
            case Failed(number, _, reason, detail, offset):
                raise self._shards[number].failure(reason, detail, offset)
        self._feed(worker)

    def _feed(self, worker: WorkerProcess) -> None:
        # With few pieces left, one each, so that the last ones end at the same time.
        depth = _QUEUE_DEPTH if len(self._waiting) > len(self._workers) else 1
        while self._waiting and len(worker.fills) < depth:
            fill = self._waiting[0]
            if self._allowance and not self._allowance.take(_nbytes_of(fill.runs)):
                return  # what is given back wakes this thread
            self._waiting.popleft()
            shard = self._shards[fill.shard]
            try:
                worker.give(fill, shard.fd, _part_fd(shard))
            except OSError:
                return  # it died, as its pidfd will tell; the piece is in its list

    def _go_on(self) -> None:
        """Hand out the pieces that are allowed now."""
        assert self._allowance is not None
        self._allowance.rest()
        self._feed_all()

    def _feed_all(self) -> None:
        for worker in self._workers:
            if worker.is_ready:
                self._feed(worker)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        start_timeout_s = settings().start_timeout_s
        late = [w for w in self._workers if not w.is_ready and now - w.active_at > start_timeout_s]
        if late == self._workers:  # else the others decode
            path = self._shards[0].shown
            text = f"no worker was ready in {start_timeout_s:g} s to decode {path}"
            remedy = "look what keeps the machine busy, or raise SHMLOAD_START_TIMEOUT_S"
            raise late[0].with_output(WorkerError(f"{text}; {remedy}", path=path))
        for worker in list(self._workers):
            is_silent = now - worker.active_at > self._stall_timeout_s
            # Its messages may still be unread if feeding another worker has taken that long.
            if worker.fills and is_silent and not worker.has_news():
                what = f"a worker made no progress in {self._stall_timeout_s:g} s"
                remedy = "check the disk it is on or raise SHMLOAD_STALL_TIMEOUT_S"
                self._replace(worker, what, remedy)

    def _replace(self, worker: WorkerProcess, what: str, remedy: str = "", how: str = "") -> None:
        """Replace a broken worker.

        Args:
            worker: the worker.
            what: what is wrong with it.
            remedy: what may help.
            how: how its process ended, if it did by itself.

        Raises:
            WorkerError: its piece was tried before, or all workers were lost one after the other.
        """
        path = self._path_of(worker)
        doing = f" while it decoded {path}" if path else ""
        self._lost_in_a_row += 1
        # Only its oldest piece counts as tried; the ones behind it were never begun.
        begun = worker.fills[0] if worker.fills else None
        is_tried = begun in self._tried
        if is_tried or self._lost_in_a_row >= max(2, self._most_workers):
            in_a_row = f"{self._lost_in_a_row} workers in a row were lost"
            why = "the piece was tried once before" if is_tried else in_a_row
            text = "; ".join(filter(None, (what + doing, why, remedy)))
            raise worker.with_output(WorkerError(text, path=path, how=how))
        logger.warning("%s%s; its pieces go to another", what, doing)
        for fileobj in (worker.channel, worker.child.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fileobj)
        self._workers.remove(worker)
        worker.close()
        if self._allowance:  # the worker is dead and no longer writes
            for fill in worker.fills:
                self._allowance.give_back(_nbytes_of(fill.runs))
        if begun:
            self._tried.add(begun)
        self._waiting.extendleft(reversed(worker.fills))
        self._feed_all()
        if self._waiting or not self._workers:
            replacement = WorkerProcess()
            self._workers.append(replacement)
            self._watch(replacement)


def _interleave(shards: Sequence[Shard], workers: int) -> list[Fill]:
    """Return all pieces, with those of each shard spread evenly over the whole list.

    The kernel lets one process at a time write to a file (tmpfs takes the inode's lock), so workers
    should not fill the same part at the same time.
    """
    every = [
        ((piece + 0.5) / len(shard.layout.pieces), Fill(number, piece, runs, workers))
        for number, shard in enumerate(shards)
        for piece, runs in enumerate(shard.layout.pieces)
    ]
    return [fill for _, fill in sorted(every, key=lambda each: each[0])]


def _nbytes_of(runs: Sequence[Run]) -> int:
    begin, end = range_of(runs)
    return end - begin
