"""Python processes that a test starts, and talks to in lines; limits of processes."""

import contextlib
import os
import resource
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

# Far above what any step takes; a child that says nothing for so long hangs.
_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 100.0


def run_to_end(command: Sequence[str | Path], **given: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output as text; return how it ended."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        **({"check": False} | given),
    )


@contextlib.contextmanager
def limited(number: int, limit: int) -> Iterator[None]:
    """Set a soft limit of this process, such as `resource.RLIMIT_FSIZE`, in the block.

    Not in a fixture: pytest writes that a test has passed before it ends them, maybe to a file.
    """
    before = resource.getrlimit(number)
    resource.setrlimit(number, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(number, before)


class Child:
    """A Python process that talks in lines; the parent never sleeps to wait for it.

    The child prints `WORD rest` and reads lines from its stdin.

    Args:
        process: a `Popen`, or what is like it, with unbuffered pipes to stdin and from stdout.
        log: the file that has what it writes to stderr.
    """

    def __init__(self, process: Any, log: str) -> None:
        self.process = process
        self._log = Path(log)
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

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
