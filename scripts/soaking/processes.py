"""The processes of a soak: starts, marks, signals and finds them."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from proc import children, open_files, pids_with

from shmload._host.procfs import command_of

_MARK = "SHMLOAD_SOAK_MARK"
_CLIENT = Path(__file__).with_name("client.py")
_SCRIPTS = Path(__file__).parents[1]
_TAIL_NBYTES = 6000
_COMMAND_TIMEOUT_S = 60.0
_SERVICE = "service"
_SERVING = b"serving, budget"
_SERVICE_DEADLINE_S = 40.0

# Short, so that stopped processes are given up soon. A worker takes some seconds to start when
# other processes use the cores.
TIMEOUTS_S = {"STALL": 3.0, "START": 15.0, "WAIT": 6.0}


class Surroundings:
    """The environment and logs of one soak's processes; finds all of them."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._mark = secrets.token_hex(8)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SHMLOAD")}
        self._environment = kept | {
            _MARK: self._mark,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_SCRIPTS), os.getenv("PYTHONPATH")])),
            "SHMLOAD_CACHE_DIR": str(work / "cache"),
            "SHMLOAD_INLINE_NBYTES": "0",
            **{f"SHMLOAD_{name}_TIMEOUT_S": str(value) for name, value in TIMEOUTS_S.items()},
        }

    def start(self, name: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a Python process; its stderr goes to the log of this name."""
        with self.log(name).open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment | variables,
            )

    def run(self, *arguments: str) -> str:
        """Run the command line of shmload and return its output.

        Raises:
            subprocess.SubprocessError: it failed or hung.
        """
        return subprocess.run(
            [sys.executable, "-P", "-m", "shmload", *arguments],
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
        ).stdout

    def evict(self) -> None:
        """Remove every segment of this soak, and no others.

        Raises:
            subprocess.SubprocessError: a segment is still in use.
        """
        try:
            self.run("rm", str(self.work))
        except subprocess.CalledProcessError as exc:
            if "no resident model or segment matches" not in exc.stderr:
                raise

    def log(self, name: str) -> Path:
        return self.work / f"{name}.log"

    def tail(self, name: str) -> str:
        """Return the end of a process's log."""
        path = self.log(name)
        return path.read_text(errors="replace")[-_TAIL_NBYTES:] if path.exists() else ""

    def errors(self) -> Iterator[tuple[str, str]]:
        """Yield the log's name and the text of each uncaught exception, once for each log."""
        for path in sorted(self.work.glob("*.log")):
            _, mark, rest = path.read_text(errors="replace").partition("Traceback")
            if mark:
                yield path.stem, mark + rest[:_TAIL_NBYTES]

    def alive(self) -> dict[int, str]:
        """Return the command line of every process of this soak by pid, orphans included."""
        mark = f"{_MARK}={self._mark}".encode()
        return {pid: " ".join(command_of(pid)) for pid in pids_with(mark, file="environ")}

    def kill_all(self) -> None:
        """Kill all processes that are left, stopped ones too."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError), hold(pid) as fd:
                if pid in self.alive():  # else the pid was reused
                    signal.pidfd_send_signal(fd, signal.SIGKILL)


class Client:
    """A client process and its current operation."""

    def __init__(self, surroundings: Surroundings, number: int) -> None:
        self.name = f"client-{number}"
        self._surroundings = surroundings
        self._received = b""
        self.start()

    def start(self) -> None:
        """Start or replace the process; it counts as busy until it reports ready."""
        self.process = self._surroundings.start(self.name, str(_CLIENT))
        self.asked: dict[str, Any] | None = {"do": "start"}
        self.asked_at = time.monotonic()
        self.is_killed = False
        self._stopped_s = 0.0
        self._stands_until = 0.0
        self._received = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def answers(self) -> IO[bytes]:
        """The pipe that is readable when the client has answered or ended."""
        assert self.process.stdout
        return self.process.stdout

    @property
    def busy_s(self) -> float:
        """Time in the current operation without the time that it was stopped, in seconds."""
        return time.monotonic() - self.asked_at - self._stopped_s

    def note_stop(self, seconds: float) -> None:
        """Note that a fault stops it for some seconds from now."""
        self._stopped_s += seconds
        self._stands_until = time.monotonic() + seconds

    def ask(self, operation: dict[str, Any]) -> None:
        self.asked, self.asked_at = operation, time.monotonic()
        self._stopped_s = max(0, self._stands_until - self.asked_at)
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # `hear` notices its end
            self.process.stdin.write(json.dumps(operation).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self) -> dict[str, Any] | None:
        """Read its answer; None if it is not complete yet.

        Raises:
            EOFError: the process has ended.
        """
        got = os.read(self.answers.fileno(), 1 << 16)
        if not got:
            raise EOFError(self.name)
        self._received += got
        if b"\n" not in self._received:
            return None
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()

    def end(self) -> int:
        """Close its stdin, kill it if it does not end, reap it; return its exit code."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


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
        return self._surroundings.tail(_SERVICE)

    def start(self) -> None:
        path = self._surroundings.log(_SERVICE)
        self._log_begin = path.stat().st_size if path.exists() else 0
        self.process = self._surroundings.start(
            _SERVICE, "-m", "shmload", "serve", "--budget", self._budget
        )

    def wait_until_ready(self) -> None:
        """Wait until it serves.

        Raises:
            TimeoutError: it does not serve in time.
        """
        deadline = time.monotonic() + _SERVICE_DEADLINE_S
        path = self._surroundings.log(_SERVICE)
        while _SERVING not in path.read_bytes()[self._log_begin :]:
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
        code = self.process.wait(_SERVICE_DEADLINE_S)
        self.process = None
        return code


def open_weights(pid: int) -> list[str]:
    """Return the shards and segments that a process has open, without the service's notice."""
    files = [each for each in open_files(pid) if not each.endswith("-service.part")]
    return [f"{pid} {f}" for f in files if f.startswith("/dev/shm/") or ".safetensors" in f]


@contextlib.contextmanager
def hold(pid: int) -> Iterator[int]:
    """Yield a pidfd, so that a signal never reaches another process with a reused pid."""
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
