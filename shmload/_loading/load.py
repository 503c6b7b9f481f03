"""One load: from shards to complete segments, in a thread beside the caller's.

        plan ----> begin ----> decode, in a thread ----> publish ----> wait for other builders
          |          |                                      |
     no room:     files() may be used from here:        wait() returns
     an error     their bytes come later

The load owns its descriptors, parts and workers until `close`, which runs whatever happens.
"""

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Source
from shmload._decoding.allowance import Allowance, Bound
from shmload._decoding.coordinator import DecodeCancelled, decode
from shmload._decoding.shard import Shard
from shmload._host.background import Background
from shmload._host.collector import paused_gc
from shmload._host.limits import explained
from shmload._host.memory import free_pages
from shmload._host.procfs import mappings_below
from shmload._loading.holdings import Holdings
from shmload._loading.progress import Progress
from shmload._loading.room import chosen_budget
from shmload._loading.trace import Phase, current, during
from shmload._segments.eviction import evict_for
from shmload._segments.models import Model, find_models
from shmload._segments.names import name_prefix
from shmload._segments.part import Part
from shmload._segments.pieces import Run, range_of
from shmload._segments.removal import remove_expired
from shmload._segments.segment import Stay
from shmload._segments.upkeep import check_digest
from shmload._settings import settings, worker_count
from shmload._wording import format_nbytes, logger_of
from shmload.errors import ArgumentError, MemoryLimitExceeded, SegmentTimeout, SharedMemoryFull

logger = logger_of(__name__)


class FilledPiece(NamedTuple):
    """Consecutive bytes of a part that have been decoded."""

    part: Part
    begin: int
    """Offset of the first byte in the part, in bytes."""
    end: int
    """Offset behind the last byte, in bytes."""


class Load:
    """A load in progress; a context that ends it.

    Args:
        source: what to load.
        rules: the rule of each component's checkpoint.
        stay: how long the segments stay.
        progress: counts the bytes.
        parent_is_busy: the caller needs a core while the load decodes.
        workers: number of worker processes; None for the number in the settings.
        bound: the most that the host holds at a time of the weights that are decoded. Only for a
            private load, whose caller frees each piece after its copy. None for no limit.
        may_link: as for `Holdings`.

    Raises:
        CheckpointError, CapacityError, SegmentError: before any byte was decoded.
    """

    def __init__(
        self,
        source: Source,
        rules: Mapping[str, Rule],
        *,
        stay: Stay,
        progress: Progress,
        parent_is_busy: bool = False,
        workers: int | None = None,
        bound: Bound | None = None,
        may_link: bool = False,
    ) -> None:
        self._source = source
        self._bound = bound
        self._allowance = Allowance(bound.ahead_nbytes) if bound else None
        self._stay = stay
        self._progress = progress
        if workers is not None and workers < 1:
            raise ArgumentError(f"workers is {workers}; it must be 1 or more, or None")
        self._workers = workers or worker_count(parent_is_busy=parent_is_busy)
        self._cancelled = threading.Event()
        self.holdings = Holdings(stay, is_bounded=bound is not None, may_link=may_link)
        """The open shards and their segments; the load closes them."""
        self._filled: queue.SimpleQueue[FilledPiece | None] = queue.SimpleQueue()
        self._trace = current()
        self._work: Background | None = None
        self.read_nbytes = 0
        """Bytes of weights that this load reads."""
        self.evicted = list[Model]()
        """The models, or parts of models, that were evicted to make room for this load."""
        try:
            with explained(source.given), paused_gc(), during(Phase.PLAN):
                self.holdings.open_shards(source, rules, bound.piece_nbytes if bound else None)
                self._begin()
        except BaseException:  # also Ctrl-C when the thread has already decoded
            self.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        else:
            self.discard()  # an error leaves nothing in shared memory

    def wait(self) -> None:
        """Block until every segment is complete; only the workers' deadlines limit the wait.

        Raises:
            CheckpointError, CapacityError, WorkerError, SegmentError: the load failed.
        """
        if self._work:
            with explained(self._source.given), during(Phase.AWAIT):
                self._work.wait()

    def next_filled(self) -> FilledPiece | None:
        """Block until a piece has its bytes, and return it; None when no more will come."""
        with during(Phase.AWAIT):
            return self._filled.get()

    @property
    def is_bounded(self) -> bool:
        """Whether the load goes on only as pieces are given back."""
        return self._bound is not None

    def give_back(self, piece: FilledPiece) -> None:
        """Free the bytes of a piece, which were copied, if the load is bounded."""
        if self._bound and self._allowance:
            free_pages(piece.part.fd, piece.begin, piece.end)
            self._allowance.give_back(piece.end - piece.begin)

    def keep_all(self, reason: str) -> None:
        """Have the host hold all weights, for what needs them there; nothing was given back yet.

        Args:
            reason: what needs them.

        Raises:
            MemoryLimitExceeded: the caller has set the bound, or memory is short.
        """
        bound, self._bound = self._bound, None
        if bound and bound.limit_nbytes is not None:
            nbytes = sum(shard.stat.st_size for shard in self.holdings.shards)
            raise MemoryLimitExceeded(
                f"the host must hold {format_nbytes(nbytes)}, and max_host_memory is "
                f"{format_nbytes(bound.limit_nbytes)}: {reason}; load it without the limit",
                needed=nbytes,
                available=bound.limit_nbytes,
                limit="max_host_memory",
            )
        if self._allowance:
            evict_for(self.holdings.unfilled_nbytes(), has_name=False)
            logger.info("%s: the host holds all weights: %s", self._source.given, reason)
            self._allowance.lift()

    def verify(self) -> None:
        """Recompute the digest of every segment.

        Raises:
            SegmentCorrupt: a segment's bytes have changed since it was decoded.
        """
        for segment in self.holdings.segments():
            check_digest(segment)

    def close(self) -> None:
        """End the load: stop the thread and workers, remove the parts, give all leases back."""
        self._end(is_discarded=False)

    def discard(self) -> None:
        """End the load and remove the segments that it has made, unless a process uses them."""
        self._end(is_discarded=True)

    def _end(self, *, is_discarded: bool) -> None:
        self._cancelled.set()
        # The thread uses what is closed next: a Ctrl-C must not cut the wait for its end short.
        interrupt = self._work.join_undisturbed() if self._work else None
        with contextlib.ExitStack() as closing:  # all, even if one raises
            closing.callback(self.holdings.close, is_discarded=is_discarded)
            if self._allowance:
                closing.callback(self._allowance.close)
        if interrupt:
            raise interrupt

    def _begin(self) -> None:
        """Take the locks and start to decode; the thread waits for other processes' parts last."""
        mine = self.holdings.acquire()
        remove_expired()  # not earlier: what this load uses stays
        try:
            if mine:
                self._prepare(mine)
        except (SharedMemoryFull, MemoryLimitExceeded) as exc:
            if mappings_below(name_prefix()):
                # Pipelines refer to themselves: a dropped one stays until a collection.
                exc.add_note(
                    "this process holds segments: drop its models, call `gc.collect()`, load again"
                )
            raise
        resident, awaited = len(self.holdings.segments()), len(self.holdings.awaited())
        words = "%s: %d shards to decode, %d resident, %d awaited"
        logger.info(words, self._source.given, len(mine), resident, awaited)
        if not (mine or awaited):
            self._decode_and_wait([])
            return
        self._progress.start(self.read_nbytes)
        self._work = Background(functools.partial(self._run, mine), "shmload-decode")
        self._work.start()

    def _run(self, mine: list[Shard]) -> None:
        """The thread's function."""
        with self._trace.thread("load") if self._trace else contextlib.nullcontext():
            self._decode_and_wait(mine)

    def _decode_and_wait(self, mine: list[Shard]) -> None:
        """Decode some shards, then wait for the parts of other processes."""
        try:
            if mine:
                self._decode(mine)
            for shard in self.holdings.awaited():
                self._wait_for(shard)
        finally:
            self._filled.put(None)

    def _wait_for(self, shard: Shard) -> None:
        """Wait for another process's part, or decode it here if that process dies."""
        timeout_s = settings().wait_timeout_s
        doing = f"waiting for another process that decodes {shard.path.name}"
        try:
            with self._progress.during(Phase.WAIT, doing):
                is_mine = self.holdings.wait_for(shard, timeout_s, self._cancelled.is_set)
        except SegmentTimeout:
            if self._cancelled.is_set():
                raise DecodeCancelled from None
            raise
        if is_mine:
            self._prepare([shard])
            self._progress.expect(shard.header.data_nbytes)
            self._decode([shard])

    def _prepare(self, shards: list[Shard]) -> None:
        """Make room for some shards' parts, and give them their length and header."""
        budget = chosen_budget() if self._stay is Stay.RESIDENT else None
        with self._progress.during(Phase.MAKE_ROOM):
            gone = self.holdings.make_parts(shards, budget, self._cancelled.is_set)
        self.read_nbytes += sum(shard.header.data_nbytes for shard in shards)
        for each in find_models(gone):
            self.evicted.append(each)
            logger.info("%s: %s", self._source.given, each.eviction)

    def _decode(self, shards: list[Shard]) -> None:
        """Fill some shards' parts, and publish them unless their pages are given back."""
        # The load's own thread decodes little faster than workers start.
        nbytes = sum(shard.header.data_nbytes for shard in shards)
        is_little = nbytes <= settings().inline_nbytes
        workers = 0 if is_little and not self._bound else self._workers
        with self._progress.during(Phase.READ):
            digests = decode(
                shards,
                workers,
                self._progress.add,
                self._cancelled.is_set,
                self._note_piece,
                self._allowance,
            )
        if self.is_bounded:
            return
        for shard, digest in zip(shards, digests, strict=True):
            self.holdings.publish(shard, digest)

    def _note_piece(self, shard: Shard, runs: Sequence[Run], pid: int, began_at: float) -> None:
        """Note a piece as filled."""
        if pid and self._trace:
            self._trace.note_piece(pid, began_at, os.fspath(shard.shown))
        assert shard.part
        self._filled.put(FilledPiece(shard.part, *range_of(runs)))
