"""Workers that stay, for many loads, one at a time and in the order they came."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from shmload._coordinator import Coordinator, Job, OnBytes

_POLL_S = 0.1


class WorkerPool:
    """Warm workers, from here until `close`; may be used from any thread.

    Args:
        workers: how many; at least one.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._coordinator = Coordinator(workers)
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self.decode_s = 0.0
        """Time spent on decoding, in seconds."""

    @property
    def waiting(self) -> int:
        """How many decodes wait for their turn."""
        return max(0, len(self._queue) - 1)

    @property
    def is_decoding(self) -> bool:
        """Whether some decode has the workers."""
        return bool(self._queue)

    def decode(
        self, jobs: Sequence[Job], on_bytes: OnBytes, is_cancelled: Callable[[], bool]
    ) -> list[str]:
        """Fill all parts, when it is this call's turn; else as `Coordinator.decode`."""
        turn = object()
        with self._changed:
            self._queue.append(turn)
        try:
            with self._changed:
                while self._queue[0] is not turn and not is_cancelled():
                    self._changed.wait(_POLL_S)
            if is_cancelled():
                return []
            began = time.monotonic()
            try:
                return self._decode(jobs, on_bytes, is_cancelled)
            finally:
                self.decode_s += time.monotonic() - began
        finally:
            with self._changed:
                self._queue.remove(turn)
                self._changed.notify_all()

    def _decode(
        self, jobs: Sequence[Job], on_bytes: OnBytes, is_cancelled: Callable[[], bool]
    ) -> list[str]:
        if not self._coordinator.is_intact:
            self._renew()
        try:
            digests = self._coordinator.decode(jobs, on_bytes, is_cancelled)
        except BaseException:
            self._renew()  # workers may still be at pieces of this call
            raise
        if is_cancelled():
            self._renew()
        return digests

    def _renew(self) -> None:
        self._coordinator.close()
        self._coordinator = Coordinator(self.workers)

    def close(self) -> None:
        """End the workers; again is fine."""
        self._coordinator.close()
