"""Whether the service is ready, and if not, why: the workers answer, the preload list is done."""

import threading
from collections.abc import Iterator


class Preloading:
    """How far the preload list is; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._current = ""
        self._failed: list[str] = []

    def expect(self, total: int) -> None:
        """Note how many sources the list has."""
        with self._lock:
            self._total = total

    def begin(self, source: str) -> None:
        """Note which source is being warmed now."""
        with self._lock:
            self._current = source

    def end(self, *, is_resident: bool) -> None:
        """Note that the source that was begun is resident, or could not be warmed."""
        with self._lock:
            self._done += 1
            if not is_resident:
                self._failed.append(self._current)

    @property
    def failed(self) -> tuple[str, ...]:
        """The sources that could not be warmed."""
        with self._lock:
            return tuple(self._failed)

    def reasons(self) -> Iterator[str]:
        """Yield what is still to be done."""
        with self._lock:
            if self._done < self._total:
                now = f": {self._current}" if self._current else ""
                yield f"preloading, {self._done} of {self._total} done{now}"
