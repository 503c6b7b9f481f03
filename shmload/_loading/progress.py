"""What a load shows while it lasts: a bar, a program's callback, or log lines."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from shmload._loading.trace import Phase, during
from shmload._wording import format_nbytes, logger_of, printing

Callback = Callable[[int, int], None]
"""Gets bytes done and bytes in all; runs in a thread of the load, not in the caller's."""

# Its lines replace a bar where there is no terminal.
logger = logger_of("shmload.progress")
_LINE_INTERVAL_S = 10.0


class Progress:
    """Counts the bytes that one load reads; a context that closes its bar.

    Args:
        report: a callback; True for a bar; False for nothing; None for a bar on a terminal, and
            elsewhere for lines in the log `shmload.progress` if the load takes long.
        title: the bar's title.
    """

    def __init__(self, report: Callback | bool | None, title: str) -> None:
        # Python has no stderr if descriptor 2 was closed when it started.
        has_stderr = sys.stderr is not None and not sys.stderr.closed
        has_terminal = has_stderr and sys.stderr.isatty()
        self._callback = report if callable(report) else None
        self._has_bar = has_stderr and (report is True or (report is None and has_terminal))
        self._has_lines = report is None and not has_terminal
        self.title = printing(title)
        self._bar: Any = None
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._began_at = self._line_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @contextlib.contextmanager
    def during(self, phase: Phase, doing: str = "") -> Iterator[None]:
        """Count the block's time for a phase of the load.

        Args:
            phase: the phase.
            doing: what the log says first if it may take long, such as `importing diffusers`.
        """
        if doing and self._has_lines:
            logger.info("%s: %s", self.title, printing(doing))
        with during(phase):
            yield

    def start(self, total: int) -> None:
        """Set the number of bytes in all, and count again from zero."""
        self._total = self._done = 0
        self._began_at = time.monotonic()
        self._line_at = self._began_at + _LINE_INTERVAL_S
        if self._bar is not None:
            self._bar.reset(0)
        self.expect(total)

    def expect(self, more: int) -> None:
        """Raise the number of bytes in all."""
        with self._lock:
            self._total += more
            if self._bar is not None:
                self._bar.total = self._total
                self._bar.refresh()
            elif self._has_bar and more:
                from tqdm import tqdm  # takes 30 ms, which a load without a bar need not pay

                self._bar = tqdm(
                    total=more, desc=self.title, unit="B", unit_scale=True, unit_divisor=1024
                )

    def add(self, nbytes: int) -> None:
        """Count bytes, up to the number in all: a piece that is read twice counts once."""
        with self._lock:
            nbytes = min(nbytes, self._total - self._done)
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
            if self._callback:
                self._callback(self._done, self._total)
            if self._has_lines and time.monotonic() > self._line_at:
                self._write_line()

    def _write_line(self) -> None:
        now = time.monotonic()
        self._line_at = now + _LINE_INTERVAL_S
        done, total = format_nbytes(self._done), format_nbytes(self._total)
        logger.info("%s: %s of %s read in %.0f s", self.title, done, total, now - self._began_at)
