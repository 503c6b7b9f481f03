"""Python processes that a test starts, and talks to in lines."""

import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

from warm_python import WarmPython

# Far above what any step takes; a child that says nothing for so long hangs.
_TIMEOUT_S = 60.0


class Child:
    """A Python process that talks in lines; the parent never sleeps to wait for it.

    The child prints `WORD rest` and reads lines from its stdin.

    Args:
        code: the source of its program.
        args: its `sys.argv[1:]`.
        prefix: a command that executes Python with the program, such as strace.
        python: forks the program where there is no prefix; None starts a new Python.
        log: a file for what it writes to stderr.
    """

    def __init__(
        self,
        code: str,
        *args: object,
        prefix: tuple[str, ...] = (),
        python: WarmPython | None = None,
        log: Path,
    ) -> None:
        self._log = log
        with log.open("wb") as errors:
            if python is not None and not prefix:
                self.process = python.start(code, args, stderr=errors)
            else:
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, "-W", "ignore", "-c", code, *map(str, args)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,
                )
        self._received = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text(errors="replace")

    def expect(self, word: str) -> str:
        """Wait for the line that starts with `word`, and return the rest of it."""
        line = self._read_line()
        assert line.split(" ", 1)[0] == word, f"{line!r} instead of {word}; {self.errors}"
        return line[len(word) + 1 :]

    def say(self, line: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return self.process.wait(_TIMEOUT_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()

    def _read_line(self) -> str:
        assert self.process.stdout
        deadline = time.monotonic() + _TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                ready = selector.select(deadline - time.monotonic())
                assert ready, f"the child said nothing; {self.errors}"
                got = os.read(self.process.stdout.fileno(), 1 << 16)
                assert got, f"the child ended; {self.errors}"
                self._received += got
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()
