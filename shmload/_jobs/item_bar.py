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


class ItemBar:
    """Shows how many items are done; a context that ends it.

    The first line comes after 10 s, then one each minute, or after 10 s more if it could not tell a
    rate yet.

    Args:
        items: their length is the total, if they have one.
        progress: True for a bar, False for nothing; None for a bar if stderr is a terminal, and
            for lines if not.
    """

    def __init__(self, items: Iterable[Any], progress: bool | None) -> None:
        self._total = len(items) if isinstance(items, Sized) else None
        self._done = self._skipped = 0
        self._first = 0.0
        """When the first item was done; before it the processes started, which is no measure."""
        self._due = time.monotonic() + _FIRST_LINE_S
        self._has_said_start = False
        self._has_lines = False
        self._bar: Any = None
        if progress or (progress is None and sys.stderr is not None and sys.stderr.isatty()):
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="item")
        else:
            self._has_lines = progress is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self) -> None:
        """Count one more item that was done in this run."""
        self._done += 1
        self._first = self._first or time.monotonic()
        if self._bar is not None:
            self._bar.update()
        self._write_if_due()

    def skip(self) -> None:
        """Count one more item that needs no work."""
        self._skipped += 1
        if self._bar is not None:
            self._bar.update()

    def wait(self, *, is_started: bool) -> None:
        """Say now and then that the job goes on, while nothing is new.

        Args:
            is_started: whether a process can work.
        """
        if is_started:
            self._write_if_due()
        elif self._has_lines and not self._has_said_start and time.monotonic() >= self._due:
            self._has_said_start = True
            _write("starting: the libraries are imported and the weights loaded")

    def _write_if_due(self) -> None:
        now = time.monotonic()
        if self._has_lines and now >= self._due and self._done + self._skipped != self._total:
            has_rate = self._done > 1 and now > self._first
            self._due = now + (_NEXT_LINE_S if has_rate else _FIRST_LINE_S)
            _write(self._line(now - self._first if has_rate else 0.0))

    def _line(self, elapsed_s: float) -> str:
        """Return the line; without a rate if no time has passed since the first item."""
        done = self._done + self._skipped
        text = f"{done:,} item{'' if done == 1 else 's'}"
        if self._total:
            text = f"{done:,} of {self._total:,} items ({done / self._total:.0%})"
        if elapsed_s > 0:
            rate = (self._done - 1) / elapsed_s
            text += f", {rate:,.0f} items/s" if rate >= 100 else f", {rate:.2g} items/s"
            if self._total and rate:
                text += f", {format_time((self._total - done) / rate)} left"
        return text


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
        print(f"shmload: {text}", file=sys.stderr, flush=True)
