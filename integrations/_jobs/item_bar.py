"""The progress of a job, counted in items: a bar on a terminal, elsewhere a line now and then."""

import contextlib
import sys
import time
from collections.abc import Iterable, Sized
from typing import Any, Self

# When the first line is due, and how long it is from one line to the next.
_FIRST_LINE_S = 10.0
_NEXT_LINE_S = 60.0


class ItemBar:
    """Shows how many items are done; a context that ends it.

    Args:
        items: their length is the total, if they have one.
        progress: True for a bar, False for nothing; None for a bar if stderr is a terminal, and
            for lines if not.
    """

    def __init__(self, items: Iterable[Any], progress: bool | None) -> None:
        self._bar: Any = None
        self._lines: ItemLines | None = None
        total = len(items) if isinstance(items, Sized) else None
        if progress or (progress is None and sys.stderr is not None and sys.stderr.isatty()):
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="item")
        elif progress is None:
            self._lines = ItemLines(total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self) -> None:
        """Count one more item that was done in this run."""
        if self._bar is not None:
            self._bar.update()
        if self._lines:
            self._lines.update()

    def wait(self, *, is_started: bool) -> None:
        """Say now and then that the job goes on, while nothing is new.

        Args:
            is_started: whether a process can work.
        """
        if self._lines:
            self._lines.wait(is_started=is_started)

    def skip(self) -> None:
        """Count one more item that needs no work."""
        if self._bar is not None:
            self._bar.update()
        if self._lines:
            self._lines.skip()


class ItemLines:
    """Writes a line to stderr now and then.

    The first comes after 10 s, then one each minute, or after 10 s more if it could not tell a
    rate yet.

    Args:
        total: how many items there are; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = self._skipped = 0
        self._first = 0.0
        """When the first item was done; before it the processes started, which is no measure."""
        self._due = time.monotonic() + _FIRST_LINE_S
        self._has_said_start = False

    def update(self) -> None:
        """Count one more item that was done in this run; write a line if one is due."""
        self._done += 1
        self._first = self._first or time.monotonic()
        self._write_if_due()

    def wait(self, *, is_started: bool) -> None:
        """Write a line if one is due, while nothing is new.

        Args:
            is_started: whether a process can work.
        """
        if is_started:
            self._write_if_due()
        elif not self._has_said_start and time.monotonic() >= self._due:
            self._has_said_start = True
            _write("starting: the libraries are imported and the weights loaded")

    def skip(self) -> None:
        """Count one more item that needs no work."""
        self._skipped += 1

    def _write_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._due and self._done + self._skipped != self._total:
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
                text += f", {_duration((self._total - done) / rate)} left"
        return text


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
        print(f"shmload: {text}", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
