"""What a load shows while it lasts: a bar, a program's callback, or log lines; and its steps.

A step counts the time that it takes, and says a word if it takes long.
"""

import contextlib
import enum
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from shmload._wording import format_nbytes, logger_of, printing

Callback = Callable[[int, int], None]
"""Gets bytes done and bytes in all; runs in a thread of the load, not in the caller's."""

# Its lines replace a bar where there is no terminal.
logger = logger_of("shmload.progress")
_LINE_INTERVAL_S = 10.0
# A shorter wait needs no word.
_SILENCE_S = 1.0


class Step(enum.Enum):
    """What a load does; the value is what a report calls it."""

    IMPORTING = "imports"
    DERIVING_RULES = "dtype rules"
    MAKING_ROOM = "making room"
    WAITING = "waiting for other processes"
    UNPICKLING = "unpickling"
    READING = "reading"
    BUILDING = "building"


def describe_times(elapsed_s: Mapping[Step, float]) -> str:
    """Write the time of each step that took a tenth of a second or more; may be empty."""
    return ", ".join(
        f"{step.value} {each:.1f} s" for step, each in elapsed_s.items() if each >= 0.1
    )


class Steps:
    """Adds up the time of each step. Several threads may be in steps of one load.

    Args:
        say: called, in a thread of its own, with the words for a step that has lasted a second.
            It returns False if they were not needed yet; they are offered again a second later.
    """

    def __init__(self, say: Callable[[str], bool]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._elapsed_s = dict.fromkeys(Step, 0.0)

    @contextlib.contextmanager
    def during(self, step: Step, doing: str = "") -> Iterator[None]:
        """Count the block's time for a step.

        Args:
            step: the step.
            doing: what to say if it takes long, such as `importing diffusers`; empty for nothing.
        """
        has_ended = threading.Event()
        teller = None
        if doing:
            teller = threading.Thread(
                target=self._tell, args=(doing, has_ended), name="shmload-steps", daemon=True
            )
            teller.start()
        began = time.monotonic()
        try:
            yield
        finally:
            elapsed_s = time.monotonic() - began
            has_ended.set()
            if teller:
                teller.join()
            with self._lock:
                self._elapsed_s[step] += elapsed_s

    def elapsed_s(self, step: Step) -> float:
        """Return the time in a step so far, in seconds."""
        return self._elapsed_s[step]

    def describe(self) -> str:
        """Return the time of each step that took a tenth of a second or more; may be empty."""
        return describe_times(self._elapsed_s)

    def _tell(self, doing: str, has_ended: threading.Event) -> None:
        while not has_ended.wait(_SILENCE_S):
            if self._say(doing):
                return


class Progress:
    """Counts the bytes that one load reads, and times its steps; a context that closes its bar.

    Args:
        report: a callback; True for a bar; False for nothing; None for a bar on a terminal, and
            elsewhere for lines in the log `shmload.progress` if the load takes long.
        title: the bar's title.

    Attributes:
        steps: the load's steps. Where there is a bar or a log, it says which step takes long.
    """

    def __init__(self, report: Callback | bool | None, title: str) -> None:
        # Python has no stderr if descriptor 2 was closed when it started.
        has_stderr = sys.stderr is not None and not sys.stderr.closed
        has_terminal = has_stderr and sys.stderr.isatty()
        self._callback = report if callable(report) else None
        self._has_bar = has_stderr and (report is True or (report is None and has_terminal))
        self._has_lines = report is None and not has_terminal
        self.title = printing(title)
        self.steps = Steps(self._say)
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

    def start(self, total: int) -> None:
        """Set the number of bytes in all, and count again from zero."""
        self._total, self._done = total, 0
        self._began_at = time.monotonic()
        self._line_at = self._began_at + _LINE_INTERVAL_S
        if self._bar is not None:
            self._bar.reset(total)
        elif self._has_bar and total:
            from tqdm import tqdm  # takes 30 ms, which a load without a bar need not pay

            self._bar = tqdm(
                total=total, desc=self.title, unit="B", unit_scale=True, unit_divisor=1024
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
        logger.info(
            "%s: %s of %s read in %.0f s",
            self.title,
            format_nbytes(self._done),
            format_nbytes(self._total),
            now - self._began_at,
        )

    def _say(self, doing: str) -> bool:
        """Say what a step is doing, unless the bar moves."""
        if self._bar is not None and 0 < self._done < self._total:
            return False
        text = f"{self.title}: {printing(doing)}"
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._has_bar:
            print(text, file=sys.stderr, flush=True)
        elif self._has_lines:
            logger.info(text)
        return True
