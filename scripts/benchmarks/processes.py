"""Start fresh processes the way a user does; time them from outside or from inside."""

import fcntl
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.samples import Result
from shmload._service.endpoint import default_path

_TIMEOUT_S = 300
_SKELETON_TIMEOUT_S = 300
_PROBES = Path(__file__).with_name("probes.py")
# Variables that configure the libraries or shmload, and could make two runs differ.
_DROPPED_PREFIXES = ("DIFFUSERS_", "HF_", "SHMLOAD_", "TRANSFORMERS_")


class ProbeFailed(Exception):
    """A measured process failed; the text is its error output."""


@dataclass(frozen=True, slots=True)
class Processes:
    """Starts measured processes in one working directory and a clean environment."""

    work: Path
    program: Path = _PROBES
    """The program whose functions are the probes."""

    def of(self, program: Path) -> "Processes":
        """Return a copy that runs the probes of another program."""
        return replace(self, program=program)

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment without variables that configure the libraries.

        The caches of byte code and of shmload's rules lie below the working directory, and are
        warm, as they are for any user after the first start.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_DROPPED_PREFIXES) and name != "PYTHONDONTWRITEBYTECODE"
        }
        return kept | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPYCACHEPREFIX": str(self.work / "bytecode"),
            "SHMLOAD_CACHE_DIR": str(self.work / "rules"),
            # The judge in the background would disturb; what measures skeletons turns them on.
            "SHMLOAD_SKELETONS": "0",
        }

    def wait_for_skeletons(self) -> None:
        """Block until no skeleton is being made.

        Raises:
            TimeoutError: it lasts too long.
        """
        folder = default_path().parent / "judge"
        end = time.monotonic() + _SKELETON_TIMEOUT_S
        while time.monotonic() < end:
            waiting = [each for each in folder.glob("*") if each.name != "lock"]
            if not waiting and not _is_locked(folder / "lock"):
                return
            time.sleep(0.2)
        raise TimeoutError("the skeletons are not made")

    def time_code(self, code: str, **variables: str) -> Result:
        """Run `python -c` and time it from outside.

        Args:
            code: the program.
            variables: environment variables in addition to `environment`.

        Returns:
            `wall_s`, and `cpu_s`, which includes its children.
        """
        _, result = self._run(["-c", code], variables)
        return result

    def time_command(self, prefix: Sequence[str], code: str) -> Result:
        """Run `python -c` by a command that times it; return the JSON of its last line."""
        output, _ = self._run(["-c", code], {}, prefix)
        found: Result = json.loads(output.splitlines()[-1])
        return found

    def probe(
        self, name: str, /, *arguments: object, prefix: Sequence[str] = (), **variables: str
    ) -> Result:
        """Run one function of the program and return what it measured.

        Args:
            name: of the function.
            arguments: of the function; paths as text.
            prefix: a command that runs the program.
            variables: environment variables in addition to `environment`.
        """
        found: dict[str, float] = self.ask(name, *arguments, prefix=prefix, **variables)
        return found

    def ask(
        self, name: str, /, *arguments: object, prefix: Sequence[str] = (), **variables: str
    ) -> Any:
        """Run one function of the program and return its JSON value; arguments as in `probe`."""
        texts = json.dumps([str(a) if isinstance(a, Path) else a for a in arguments])
        output, _ = self._run(["-P", str(self.program), name, texts], variables, prefix)
        # The libraries may print too; the result is the last line.
        return json.loads(output.splitlines()[-1])

    def _run(
        self, arguments: Sequence[str], variables: dict[str, str], prefix: Sequence[str] = ()
    ) -> tuple[str, Result]:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            cpu_before = _children_cpu_s()
            began = time.perf_counter()
            process = subprocess.Popen(
                [*prefix, sys.executable, *arguments],
                cwd=self.work,
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
            try:
                _wait(process.pid)
            except BaseException:
                process.kill()
                raise
            finally:
                code = process.wait()
            wall_s = time.perf_counter() - began
            output.seek(0)
            errors.seek(0)
            if code:
                raise ProbeFailed(
                    f"{' '.join(arguments)[:200]} exited with {code}:\n{errors.read()}"
                )
            return output.read(), {"wall_s": wall_s, "cpu_s": _children_cpu_s() - cpu_before}


def _wait(pid: int) -> None:
    """Wait for a child's end; `Popen.wait` with a timeout would look only every 50 ms."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_TIMEOUT_S * 1000):
            raise ProbeFailed(f"process {pid} still ran after {_TIMEOUT_S} s")
    finally:
        os.close(pidfd)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock of a file."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
