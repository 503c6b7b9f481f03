"""The service of a soak: starts, kills, restarts and ends it."""

import signal
import time
from typing import TYPE_CHECKING

from proc import children

from soaking.processes import Surroundings, open_weights

if TYPE_CHECKING:
    import subprocess

_NAME = "service"
_READY = b"serving at"
_DEADLINE_S = 40.0


class Service:
    """A service; its `process` is None between a kill and the restart."""

    def __init__(self, surroundings: Surroundings, budget_nbytes: int) -> None:
        self._surroundings = surroundings
        self._budget = str(budget_nbytes)
        self._log_begin = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def log(self) -> str:
        return self._surroundings.tail(_NAME)

    def start(self) -> None:
        path = self._surroundings.log(_NAME)
        self._log_begin = path.stat().st_size if path.exists() else 0
        self.process = self._surroundings.start(
            _NAME, "-m", "shmload", "serve", "--budget", self._budget, "--workers", "2"
        )

    def wait_until_ready(self) -> None:
        """Wait until it serves.

        Raises:
            TimeoutError: it does not serve in time.
        """
        deadline = time.monotonic() + _DEADLINE_S
        path = self._surroundings.log(_NAME)
        while _READY not in path.read_bytes()[self._log_begin :]:
            if time.monotonic() > deadline or self.has_ended():
                raise TimeoutError(f"the service does not serve:\n{self.log}")
            time.sleep(0.05)

    def has_ended(self) -> bool:
        """Tell whether it ended by itself."""
        return self.process is not None and self.process.poll() is not None

    def left_open(self, timeout_s: float) -> list[str]:
        """Return files of loads that it or its workers have open longer than a time, in seconds."""
        assert self.process
        deadline = time.monotonic() + timeout_s
        while True:
            pids = (self.process.pid, *children(self.process.pid))
            left = [line for pid in pids for line in open_weights(pid)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def end(self) -> int:
        """End it as an operator does; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it does not end in time.
        """
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(_DEADLINE_S)
        self.process = None
        return code
