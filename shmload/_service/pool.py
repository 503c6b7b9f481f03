"""Workers that serve many loads, one load at a time, first come first served."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from shmload._decoding.coordinator import Coordinator, DecodeCancelled, Job, OnBytes

_POLL_S = 0.1


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
        self._decode_s = 0.0
        self._began_at: float | None = None

    @property
    def waiting(self) -> int:
        """Number of decodes that wait for their turn."""
        return max(0, len(self._queue) - 1)

    @property
    def is_decoding(self) -> bool:
        """Whether a decode is using the workers."""
        return bool(self._queue)

    @property
    def decode_s(self) -> float:
        """Time spent decoding, in seconds, including the decode that runs."""
        with self._changed:
            began_at = self._began_at
            return self._decode_s + (time.monotonic() - began_at if began_at is not None else 0)

    def decode(
        self, jobs: Sequence[Job], on_bytes: OnBytes, is_cancelled: Callable[[], bool]
    ) -> list[str]:
        """Wait for this call's turn, then do what `Coordinator.decode` does."""
        turn = object()
        with self._changed:
            self._queue.append(turn)
        try:
            while not self._is_turn_of(turn):
                if is_cancelled():  # without the condition, since this call may take long
                    raise DecodeCancelled
            self._began_at = time.monotonic()
            try:
                return self._decode(jobs, on_bytes, is_cancelled)
            finally:
                with self._changed:
                    self._decode_s += time.monotonic() - self._began_at
                    self._began_at = None
        finally:
            with self._changed:
                self._queue.remove(turn)
                self._changed.notify_all()

    def _is_turn_of(self, turn: object) -> bool:
        """Wait up to `_POLL_S` for a call's turn; returns whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queue[0] is turn, _POLL_S)

    def _decode(
        self, jobs: Sequence[Job], on_bytes: OnBytes, is_cancelled: Callable[[], bool]
    ) -> list[str]:
        if self._coordinator and not self._coordinator.is_intact:
            self.close()
        if self._coordinator is None:
            self._coordinator = Coordinator(self.workers)
        try:
            return self._coordinator.decode(jobs, on_bytes, is_cancelled)
        except BaseException:
            self.close()  # workers may still be filling pieces of this call
            raise

    def close(self) -> None:
        """End the workers; a second call is fine. A later decode starts new ones."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator:
            coordinator.close()
