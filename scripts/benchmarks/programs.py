"""Programs as a user starts them: the time from the command to the line `READY`."""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ProbeFailed, Processes
from benchmarks.samples import Result

_TIMEOUT_S = 300
_SHMLOAD = Path(sys.executable).with_name("shmload")

READY = "ready"
"""The line that a program prints when it is ready."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Starts programs under `python` and under `shmload run`, with templates of their own."""

    processes: Processes
    runtime: Path
    """Directory for the sockets of the templates; its path must be short."""

    def python(self, *arguments: str, **variables: str) -> Result:
        """Run a program in the ordinary way; see `time_ready`."""
        return self.time_ready([sys.executable, *arguments], variables)

    def run(self, *arguments: str, **variables: str) -> Result:
        """Run a program with `shmload run` in a copy of a template; see `time_ready`.

        Raises:
            ProbeFailed: also if it was run in the ordinary way.
        """
        return self.time_ready([str(_SHMLOAD), "run", "-v", *arguments], variables)

    def time_ready(self, command: Sequence[str], variables: dict[str, str]) -> Result:
        """Run a command and time it from outside.

        Args:
            command: prints the line `READY` once it is ready, and then lines of a name and a
                number if it likes.
            variables: environment variables in addition to `environment`.

        Returns:
            `ready_s`, from the start of the command to the line, and `wall_s`, to its end; and
            the numbers that it printed, by their names.

        Raises:
            ProbeFailed: it failed, wrote to standard error that it ran in the ordinary way, or
                printed something else.
        """
        with tempfile.TemporaryFile("w+") as errors:
            began = time.perf_counter()
            process = subprocess.Popen(
                command,
                cwd=self.processes.work,
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            try:
                line, rest = _read_line(process)
                ready_s = time.perf_counter() - began
                # Its end closes this. `Popen.wait` with a timeout looks only every 50 ms.
                rest += process.stdout.read() if process.stdout else b""
                code = process.wait(_TIMEOUT_S)
            except BaseException:
                process.kill()
                process.wait()
                raise
            finally:
                if process.stdout:
                    process.stdout.close()
            wall_s = time.perf_counter() - began
            errors.seek(0)
            said = errors.read()
        if code or line != READY or "in the ordinary way" in said:
            raise ProbeFailed(f"{' '.join(command)[:200]} exited with {code}, {line!r}:\n{said}")
        pairs = (text.split() for text in rest.decode().splitlines())
        numbers = {name: float(value) for name, value in pairs}
        return {"ready_s": ready_s, "wall_s": wall_s} | numbers

    @property
    def environment(self) -> dict[str, str]:
        """The environment of measured processes, with a directory for these templates alone."""
        own = {"SHMLOAD_SKELETONS": "1", "XDG_RUNTIME_DIR": str(self.runtime)}
        return self.processes.environment | own

    def warm_template(self, **variables: str) -> None:
        """Start the template for these variables and wait until it serves."""
        self._shmload("template", "warm", variables=variables)

    def stop_templates(self) -> None:
        """End the templates that were started here."""
        self._shmload("template", "stop", variables={})

    def _shmload(self, *arguments: str, variables: dict[str, str]) -> None:
        done = subprocess.run(
            [_SHMLOAD, *arguments],
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            raise ProbeFailed(f"shmload {' '.join(arguments)} failed:\n{done.stderr}")


@contextlib.contextmanager
def programs_of(processes: Processes) -> Iterator[Programs]:
    """Yield a starter of programs; end its templates afterwards."""
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        programs = Programs(processes, Path(folder))
        try:
            yield programs
        finally:
            programs.stop_templates()


def _read_line(process: "subprocess.Popen[bytes]") -> tuple[str, bytes]:
    """Return the first line that a process prints, without its end, and what came with it."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + _TIMEOUT_S
    found = b""
    while b"\n" not in found:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ProbeFailed(f"process {process.pid} printed no line in {_TIMEOUT_S} s")
        piece = os.read(descriptor, 4096)
        if not piece:
            break
        found += piece
    line, _, rest = found.partition(b"\n")
    return line.decode(), rest
