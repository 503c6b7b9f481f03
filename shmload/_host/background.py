"""Work in a thread while its owner does something else."""

import threading
from collections.abc import Callable


class Background:
    """A function in a thread of its own; `wait` raises its error.

    Args:
        function: what the thread runs.
        name: of the thread.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._error: BaseException | None = None
        self._beginning = threading.Lock()
        self._has_begun = False
        self._is_over = threading.Event()
        self._is_over.set()
        # As an argument, because a thread drops its arguments when it ends.
        self._thread = threading.Thread(target=self._run, args=(function,), name=name)

    def start(self) -> None:
        """Start the thread.

        The constructor does not: its owner must hold this object before Ctrl-C can come.

        Raises:
            RuntimeError: the system has no more threads.
        """
        try:
            self._is_over.clear()
            self._thread.start()
        except BaseException:  # also Ctrl-C in the middle of start()
            with self._beginning:
                if not self._has_begun:
                    self._is_over.set()
            raise

    def join(self) -> None:
        """Block until the function has ended, whether or not it raised."""
        # Up to Python 3.12 a join that Ctrl-C interrupts marks the thread as ended.
        self._is_over.wait()
        if self._has_begun:
            self._thread.join()

    def wait(self) -> None:
        """Block until the function has ended; raise its error if it raised one."""
        self.join()
        if self._error:
            raise self._error

    def join_undisturbed(self) -> KeyboardInterrupt | None:
        """Block until the function has ended; return the last Ctrl-C that came before, if any."""
        interrupt = None
        while True:
            try:
                self.join()
            except KeyboardInterrupt as exc:
                interrupt = exc
            else:
                return interrupt

    def _run(self, function: Callable[[], None]) -> None:
        with self._beginning:
            if self._is_over.is_set():
                return  # too late: start() has raised, and its caller counts it as not started
            self._has_begun = True
        try:
            function()
        except BaseException as exc:  # `wait` raises it
            self._error = exc
        finally:
            self._is_over.set()
