"""The processes of a soak: starts, marks, signals and finds them."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from own_memory import take_own_shared_memory as take_own_shared_memory
from watching import children_of

SHM = Path("/dev/shm")
_MARK = "SHMLOAD_SOAK_MARK"
_SCRIPTS = Path(__file__).parents[1]
_COMMAND_TIMEOUT_S = 60.0
# Longest time for an operation: it waits for its turn at the service behind every other client,
# each of which may lose two stalled workers, and then does the same again without the service,
# shard by shard. Meanwhile it may be stopped, which lasts 8 s at most.
_DEADLINE_S = 90.0
# Short, so that stopped processes are given up soon. A worker takes some seconds to start when
# other processes use the cores.
_TIMEOUTS_S = {"STALL": 3.0, "START": 15.0, "WAIT": 6.0}


class Surroundings:
    """The environment and logs of one soak's processes; finds all of them."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SHMLOAD")}
        self._environment = kept | {
            _MARK: self._mark.partition("=")[2],
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_SCRIPTS), os.getenv("PYTHONPATH")])),
            "SHMLOAD_CACHE_DIR": str(work / "cache"),
            "SHMLOAD_INLINE_NBYTES": "0",
            **{f"SHMLOAD_{name}_TIMEOUT_S": str(value) for name, value in _TIMEOUTS_S.items()},
        }

    def start(self, name: str, *words: str) -> "subprocess.Popen[str]":
        """Start a Python process; its stderr goes to the log of this name."""
        with (self._work / f"{name}.log").open("a") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                text=True,
            )

    def shmload(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run the command line of shmload, which may fail."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "shmload", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
        )

    def log(self, name: str) -> str:
        """Return what processes of this name have written to stderr."""
        return (self._work / f"{name}.log").read_text(errors="replace")

    def alive(self) -> list[int]:
        """Return every process of this soak, orphans included."""
        return list(pids_with(self._mark.encode(), file="environ"))


class Ended(Exception):
    """A client has ended."""


class Client:
    """A client process, which answers one operation at a time."""

    def __init__(self, surroundings: Surroundings, name: str) -> None:
        self.name = name
        self._surroundings = surroundings
        self.path = ""
        """Of the source that it works on; empty for none."""
        self.start()

    def start(self) -> None:
        """Start or replace the process, and wait until it reports ready."""
        self.is_killed = False
        self.process = self._surroundings.start(self.name, "-m", "soaking.client")
        with contextlib.suppress(Ended):  # the next operation tells
            self._hear()

    def ask(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Have it do an operation; return its answer.

        Raises:
            Ended: it has ended.
            TimeoutError: it does not answer in time. Its log has its stack.
        """
        self.path = operation.get("path", "")
        try:
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(operation), file=self.process.stdin, flush=True)
            return self._hear()
        finally:
            self.path = ""

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], _DEADLINE_S)[0]:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            raise TimeoutError(f"not done after {_DEADLINE_S:.0f} s")
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise Ended
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()

    def end(self) -> int:
        """Close its stdin, so that it ends; return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=_DEADLINE_S)
        return self.process.wait(_DEADLINE_S)


# Processes of which only the number is known ------------------------------------------------------


def pids_with(mark: bytes, *, file: str) -> Iterator[int]:
    """Yield the processes whose `cmdline` or `environ` has some bytes."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/{file}").read_bytes():
                yield int(pid)


@contextlib.contextmanager
def signalling(pid: int, number: signal.Signals, parent: int | None = None) -> Iterator[None]:
    """Send a signal, unless the process has ended or has another parent; then let it go on.

    A pidfd holds the process, so that no signal reaches another one with a reused pid.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            stack.callback(os.close, fd)
            if parent is None or pid in children_of(parent):
                signal.pidfd_send_signal(fd, number)
                stack.callback(_go_on, fd)
        yield


def _go_on(fd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGCONT)
