"""Progress in bytes: a bar on a terminal, a callback for programs, else nothing."""

import sys
import threading
from collections.abc import Callable
from typing import Any, Self

Callback = Callable[[int, int], None]
"""Gets bytes done and bytes in all; runs in a thread of the load, not in the caller's."""


class Progress:
    """Counts the bytes of one load; a context that closes its bar.

    Args:
        report: a callback; True for a bar; False for nothing; None for a bar on a terminal.
        title: the bar's title.
    """

    def __init__(self, report: Callback | bool | None, title: str) -> None:
        self._callback = report if callable(report) else None
        # Python has no stderr if descriptor 2 was closed when it started.
        is_terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
        self._has_bar = sys.stderr is not None and (
            report is True or (report is None and is_terminal)
        )
        self._title = title
        self._bar: Any = None
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, total: int) -> None:
        """Set the number of bytes in all, and count again from zero."""
        self._total, self._done = total, 0
        if self._bar is not None:
            self._bar.reset(total)
        elif self._has_bar and total:
            from tqdm import tqdm  # takes 30 ms, which a load without a bar need not pay

            self._bar = tqdm(
                total=total, desc=self._title, unit="B", unit_scale=True, unit_divisor=1024
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
