"""Workers that serve many loads, one load at a time, first come first served."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from shmload._decoding.coordinator import Coordinator
from shmload._decoding.job import DecodeCancelled, Job, OnBytes
from shmload._wording import logger_of
from shmload.errors import WorkerError

logger = logger_of(__name__)

_POLL_S = 0.1
# How long workers may take for a sign of life.
_ANSWER_S = 1.0


class WorkerPool:
    """Worker processes kept between loads, until `close`; thread-safe.

    Args:
        workers: number of processes, at least one.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._coordinator: Coordinator | None = Coordinator(workers)
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._asking = threading.Lock()  # held while the workers are asked for a sign of life
        self._is_closed = False

    def decode(
        self,
        jobs: Sequence[Job],
        on_bytes: OnBytes,
        is_cancelled: Callable[[], bool],
        stall_timeout_s: float,
        on_begin: Callable[[], object] = bool,
    ) -> list[str]:
        """Wait for this call's turn, call `on_begin`, then do what `Coordinator.decode` does."""
        with self._queued() as turn:
            while not self._is_turn_of(turn, _POLL_S):
                if is_cancelled():  # without the condition, since this call may take long
                    raise DecodeCancelled
            on_begin()
            coordinator = self._renew()
            try:
                return coordinator.decode(
                    jobs, on_bytes, is_cancelled, stall_timeout_s=stall_timeout_s
                )
            except BaseException:
                self._end_workers()  # they may still be filling pieces of this call
                raise

    @contextlib.contextmanager
    def _queued(self) -> Iterator[object]:
        """Stand in the queue for the workers inside the block."""
        turn = object()
        with self._changed:
            self._queue.append(turn)
        try:
            yield turn
        finally:
            with self._changed:
                self._queue.remove(turn)
                self._changed.notify_all()

    def _is_turn_of(self, turn: object, timeout_s: float) -> bool:
        """Wait for a turn to come; returns whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queue[0] is turn, timeout_s)

    def silent_workers(self) -> int:
        """Return how many workers give no sign of life; takes up to `_ANSWER_S`.

        Replaces workers that died while there was nothing to do. While decodes run, the answer is
        0: a decode watches its workers itself.
        """
        with self._asking, self._queued() as turn:
            if not self._is_turn_of(turn, 0):
                return 0
            try:
                return self.workers if self._is_closed else self._renew().silent_workers(_ANSWER_S)
            except WorkerError:
                return self.workers

    def _renew(self) -> Coordinator:
        """Return the workers, new ones if some have died."""
        ended = self._coordinator.ended() if self._coordinator else ()
        for pid, how in ended:
            said = "worker %d ended between decodes (%s); new ones start"
            logger.warning(said, pid, how, extra={"pid": pid})
        if ended:
            self._end_workers()
        if self._coordinator is None:
            self._coordinator = Coordinator(self.workers)
        return self._coordinator

    def close(self) -> None:
        """End the workers; a second call is fine. A later decode starts new ones."""
        with self._asking:
            self._is_closed = True
            self._end_workers()

    def _end_workers(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator:
            coordinator.close()
