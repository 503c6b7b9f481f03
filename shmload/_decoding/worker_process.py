"""One worker process as its coordinator sees it: start, talk, watch, end.

Owns the child, its socket, its pidfd and the file that catches what it prints.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from shmload._ipc.frames import (
    VERSION,
    Close,
    Failed,
    Fill,
    Filled,
    FromWorker,
    Inbox,
    Open,
    Ready,
    decode_from_worker,
    send,
)
from shmload._settings import settings
from shmload.errors import ProtocolError, WorkerFailed

logger = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 10.0
_OUTPUT_TAIL_NBYTES = 4000


class Task(NamedTuple):
    """A piece to be filled, and how often it has been handed out."""

    shard: int
    piece: int
    attempts: int


def _environment() -> dict[str, str]:
    """Return what a worker may know: not what systemd has told this very process."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LISTEN_") and name != "NOTIFY_SOCKET"
    }


class WorkerProcess:
    """A child that runs `shmload.workers.main`, from here until `close`."""

    def __init__(self) -> None:
        self._opened: set[int] = set()
        self.tasks: deque[Task] = deque()
        """Handed out and not yet answered, oldest first."""
        self.is_ready = False
        self.active_at = time.monotonic()
        """When it last showed life, by the monotonic clock, in seconds."""
        with contextlib.ExitStack() as undoing:
            try:
                self._start(undoing)
            except OSError as exc:
                raise WorkerFailed(
                    f"a worker could not be started: {exc}; sys.executable must be a Python "
                    "interpreter, with processes, memory and descriptors to spare"
                ) from exc
            undoing.pop_all()

    def _start(self, undoing: contextlib.ExitStack) -> None:
        """Start the child; `undoing` gets what gives all back if that fails half-way."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        undoing.enter_context(ours)
        # A worker that has stopped reading must not hold up whoever feeds it.
        ours.settimeout(settings().stall_timeout_s)
        self.channel = ours
        self._inbox = Inbox(ours)
        # -P: a json.py in the user's directory must not be imported. Not multiprocessing: its spawn
        # imports the user's main module, its fork copies torch's threads.
        command = [sys.executable, "-P", "-m", "shmload.workers.main"]
        with theirs:
            self._output_fd = os.memfd_create("shmload-worker-output", os.MFD_CLOEXEC)
            undoing.callback(os.close, self._output_fd)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._output_fd,
                stderr=self._output_fd,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
            )
        undoing.callback(self._process.wait, _KILL_TIMEOUT_S)
        undoing.callback(self._process.kill)
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def give(self, task: Task, fill: Fill, source: int, target: int) -> None:
        """Hand out a piece, the shard's descriptors first where the worker lacks them."""
        if not self.tasks:
            self.active_at = time.monotonic()
        self.tasks.append(task)  # first: where sending fails it must not get lost
        if task.shard not in self._opened:
            send(self.channel, Open(task.shard), (source, target))
            self._opened.add(task.shard)
        send(self.channel, fill)

    def forget(self, shard: int) -> None:
        """Let the worker close a shard that is complete."""
        if shard in self._opened:
            self._opened.discard(shard)
            with contextlib.suppress(OSError):  # it is gone; whoever watches it will see
                send(self.channel, Close(shard))

    def has_news(self) -> bool:
        """Tell whether something of it is still unread."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self) -> Iterator[FromWorker]:
        """Yield the messages that have arrived; ends at once when the worker is gone.

        Raises:
            ProtocolError: one is no message, or an answer to nothing that was asked.
            WorkerFailed: the worker is of another version.
        """
        self._inbox.receive()
        while (frame := self._inbox.next_frame()) is not None:
            message = decode_from_worker(frame)
            self.active_at = time.monotonic()
            match message:
                case Ready(version):
                    if version != VERSION:
                        raise WorkerFailed(f"the worker speaks version {version}, not {VERSION}")
                    self.is_ready = True
                case Filled(shard, piece) | Failed(shard, piece):
                    if not self.tasks or self.tasks[0][:2] != (shard, piece):
                        raise ProtocolError(f"an answer for piece {piece} that was not asked for")
                    self.tasks.popleft()
            yield message

    @property
    def has_exited(self) -> bool:
        """Whether it ended of its own accord, and not by a signal."""
        code = self._process.poll()
        return code is not None and code >= 0

    def how_it_ended(self) -> str:
        """Wait for the child and say how it ended, such as `SIGKILL` or `exit code 3`."""
        code = self._process.wait(_KILL_TIMEOUT_S)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def start_failure(self) -> WorkerFailed:
        """Return the error for a child that ended before it was ready."""
        error = WorkerFailed(
            f"a worker could not start ({self.how_it_ended()}): run "
            f"`{sys.executable} -P -c 'import shmload.workers.main'` to see why"
        )
        size = os.fstat(self._output_fd).st_size
        tail = os.pread(self._output_fd, _OUTPUT_TAIL_NBYTES, max(0, size - _OUTPUT_TAIL_NBYTES))
        if tail:
            error.add_note("its output: " + tail.decode(errors="replace").strip())
        return error

    def close(self) -> None:
        """Kill the child and reap it; again is fine."""
        if self.pidfd < 0:
            return
        self._process.kill()
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
        if self._process.returncode is None:
            # Killed, but inside the kernel, where a dead disk can hold a process for ever.
            logger.error("worker %d cannot be ended; it waits for a device", self._process.pid)
        pidfd, self.pidfd = self.pidfd, -1
        os.close(pidfd)
        os.close(self._output_fd)
