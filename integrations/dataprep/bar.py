"""The progress of a job, counted in items: a bar on a terminal, elsewhere a line now and then."""

import contextlib
import sys
import time
from collections.abc import Iterable, Sized
from typing import Any, Self

from shmload._wording import format_time

# When the first line is due, and how long it is from one line to the next.
_FIRST_LINE_S = 10.0
_NEXT_LINE_S = 60.0


class Bar:
    """Shows how many items are done, their rate and the time left; a context that ends it.

    Args:
        items: their length is the total, if they have one.
        progress: True for a bar, False for nothing; None for a bar if stderr is a terminal, and
            for lines if not.
    """

    def __init__(self, items: Iterable[Any], progress: bool | None) -> None:
        self._total = len(items) if isinstance(items, Sized) else None
        self._done = self._skipped = 0
        self._began: float | None = None
        """When the processes had started; what came before is no measure of the rate."""
        self._due = time.monotonic() + _FIRST_LINE_S
        self._bar: Any = None
        self._has_lines = progress is None
        if progress or (progress is None and sys.stderr is not None and sys.stderr.isatty()):
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="item")
            self._has_lines = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int) -> None:
        """Count items that were done in this run; below 0 if they are to be done again."""
        self._done += count
        if self._bar is not None and count:
            self._bar.update(count)

    def skip(self, count: int) -> None:
        """Count items that need no work."""
        self._skipped += count
        if self._bar is not None:
            self._bar.initial += count  # not part of the rate
            self._bar.update(count)

    def look(self, has_started: bool) -> None:
        """Write a line if one is due.

        Args:
            has_started: whether a process can work.
        """
        now = time.monotonic()
        if has_started and self._began is None:
            self._began = now
        if self._has_lines and now >= self._due:
            self._due = now + _NEXT_LINE_S
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                print(f"shmload: {self._line(now)}", file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        if self._began is None:
            return "starting: the libraries are imported and the weights loaded"
        done = self._done + self._skipped
        text = f"{done:,} items"
        if self._total:
            text = f"{done:,} of {self._total:,} items ({done / self._total:.0%})"
        rate = self._done / max(now - self._began, 1e-3)
        text += f", {rate:,.0f} items/s" if rate >= 100 else f", {rate:.2g} items/s"
        if self._total and rate:
            text += f", {format_time((self._total - done) / rate)} left"
        return text
