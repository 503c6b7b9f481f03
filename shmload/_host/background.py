"""Work that goes on in a thread while its owner does something else."""

import threading
from collections.abc import Callable


class Background:
    """A function in a thread of its own; its error is for whoever waits.

    Args:
        function: what is to be done.
        name: of the thread.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._error: BaseException | None = None
        self._beginning = threading.Lock()
        self._has_begun = False
        self._is_over = threading.Event()
        self._is_over.set()
        # The function as an argument, which the thread lets go of in the end.
        self._thread = threading.Thread(target=self._run, args=(function,), name=name)

    def start(self) -> None:
        """Begin. Not when it is made: its owner shall have it when Ctrl-C comes.

        Raises:
            RuntimeError: no more threads are to be had.
        """
        try:
            self._is_over.clear()
            self._thread.start()
        except BaseException:  # Ctrl-C too, in its middle
            with self._beginning:
                if not self._has_begun:
                    self._is_over.set()
            raise

    def join(self) -> None:
        """Block until it has ended, however it has."""
        # Up to Python 3.12 a join that Ctrl-C interrupts takes the thread for ended.
        self._is_over.wait()
        if self._has_begun:
            self._thread.join()

    def wait(self) -> None:
        """Block until it has ended, and raise the error with which it has."""
        self.join()
        if self._error:
            raise self._error

    def join_undisturbed(self) -> KeyboardInterrupt | None:
        """Block until it has ended; returns a Ctrl-C that came meanwhile, for later."""
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
                return  # it has come too late: whoever started it was told that it has not
            self._has_begun = True
        try:
            function()
        except BaseException as exc:  # handed to whoever waits
            self._error = exc
        finally:
            self._is_over.set()
