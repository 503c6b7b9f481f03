"""Who may use a crew of processes, and whether its last use came to its end."""

import contextlib
import os
import threading
from collections.abc import Iterator

from shmload.errors import ArgumentError


class Access:
    """The right to use a crew: for the process that made this, one thread at a time, until `close`.

    Any thread may close it, and so may a signal handler in the middle of a use.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._is_closed = False
        # Not a Lock: a signal handler may close in the middle of a use.
        self.lock = threading.RLock()
        self.is_unsure = False
        """Whether an error or an interrupt has ended a use in the middle."""

    @property
    def is_mine(self) -> bool:
        """Tell whether this process made it; a forked child has only a copy."""
        return os.getpid() == self._owner

    @property
    def is_closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._is_closed

    def check(self) -> None:
        """Raise an error if the job cannot be used, or not by this process.

        Raises:
            ArgumentError: it was closed, or belongs to another process.
        """
        if not self.is_mine:
            raise ArgumentError(
                f"this job belongs to process {self._owner}, which was forked; make another one"
            )
        if self._is_closed:
            raise ArgumentError("this job is closed; make another one")

    def close(self) -> None:
        """End the job's use: later uses raise, one in another thread does at its next step."""
        self._is_closed = True

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Hold the lock for a use; an exception in the block leaves `is_unsure` set.

        Raises:
            ArgumentError: as `check`.
        """
        self.check()  # first: in a forked child the lock may be a copy that a thread held
        with self.lock:
            self.check()
            before, self.is_unsure = self.is_unsure, True
            yield
            self.is_unsure = before
