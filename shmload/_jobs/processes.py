"""The processes of a job as the job sees them: the fork server, and each runner."""

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from shmload._ipc import procs
from shmload._ipc.frames import Inbox, send, to_frame
from shmload._jobs.messages import (
    MAX_FRAME_NBYTES,
    Answer,
    FromRunner,
    FromServer,
    Prepared,
    Setup,
    Started,
    ToRunner,
    ToServer,
    decode_from_runner,
    decode_from_server,
)
from shmload._settings import settings
from shmload.errors import JobFailed

# A process with threads cannot be forked. These start none then: torch's pools (torch reads the
# numbers when it is imported), progress bars, and the wait for other ranks of a launcher.
_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "LOCAL_WORLD_SIZE": "1",
}
# A read takes 256 KiB at most; after so many it is another process's turn.
_READS_IN_A_ROW = 64
_WRITE_NBYTES = 1 << 20


class Server:
    """A child that runs `shmload._jobs.forkserver`, from here until `close`.

    Args:
        handle: of the pipeline, as text.
        threads: of each runner, for torch.
        preload: modules to import beside the libraries.

    Raises:
        JobFailed: it cannot be started. If it ends at once, only its messages end.
    """

    def __init__(self, handle: str, threads: int, preload: Sequence[str]) -> None:
        self.is_prepared = False
        self.since = time.monotonic()
        """When it was started, by the monotonic clock, in seconds."""
        path = tuple(os.fsencode(entry) for entry in sys.path if isinstance(entry, str))
        try:
            self._child = procs.start(
                "shmload._jobs.forkserver",
                channel_timeout_s=settings().stall_timeout_s,
                env=os.environ | _SINGLE_THREADED,
                stdout=None if sys.__stdout__ else subprocess.DEVNULL,
                stderr=None if sys.__stderr__ else subprocess.DEVNULL,
            )
        except OSError as exc:
            raise JobFailed(
                f"the processes of a job could not be started: {exc}; sys.executable must be a "
                "Python interpreter, with processes, memory and descriptors to spare"
            ) from exc
        self.pid = self._child.pid
        self.channel = self._child.channel
        self.inbox = Inbox(self.channel)
        environment = {name: os.environ.get(name) for name in _SINGLE_THREADED}
        self.send(
            Setup(
                handle=handle,
                path=path,
                environment=environment,
                threads=threads,
                preload=tuple(preload),
            )
        )

    def send(self, message: ToServer, fds: tuple[int, ...] = ()) -> bool:
        """Send a message; False if it does not take it: then it is killed, and its messages end."""
        try:
            send(self.channel, message, fds)
        except OSError:
            self.kill()  # it may be stopped, and have half a message
            return False
        return True

    def messages(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived.

        Raises:
            ProtocolError: what it sent is not a message of this version.
        """
        while (frame := self.inbox.next_frame()) is not None:
            message = decode_from_server(frame)
            if isinstance(message, Prepared):
                self.is_prepared = True
            yield message

    def kill(self) -> None:
        """Send SIGKILL, which ends its runners too; do not wait. Its messages end then."""
        self._child.kill()

    def close(self) -> str:
        """End it and its runners, wait for that, and return how it ended; a second call is fine."""
        with contextlib.suppress(OSError):
            # Closing alone would not reach it while a forked copy of this process has the socket.
            self.channel.shutdown(socket.SHUT_RDWR)
        self._release()
        return self._child.end(ask=False)

    def forget(self) -> None:
        """Close its descriptors in a forked copy of the job's process, which is not its parent."""
        self._release()
        self._child.forget()

    def _release(self) -> None:
        self.channel.close()
        self.inbox.close()


class Runner:
    """One runner; owns its socket and its pidfd. Times are of the monotonic clock, in seconds.

    Args:
        place: its place in the crew, from 0.
        channel: a socket to it, which must not block.
    """

    def __init__(self, place: int, channel: socket.socket) -> None:
        self.place = place
        self.channel = channel
        self.outbox = bytearray()
        self.pid = 0
        self.pidfd = -1
        self.is_started = False
        """Whether its models are on their device."""
        self.is_silent = False
        """Whether its socket has reached the end of file, or is no longer listened to."""
        self.how: str | None = None
        """How it ended, or why it was killed; None before, and if that was not the item's fault."""
        self.since = time.monotonic()
        """When it began its present work: to start, or an item."""
        self.active_at = self.since
        """When it last took or sent bytes."""
        self.ending_since = math.inf
        """When it was killed or fell silent; the fork server must report its end soon after."""
        self.item_s = math.inf
        """How long its previous item took, in seconds."""
        self._inbox = Inbox(channel, MAX_FRAME_NBYTES)

    def post(self, message: ToRunner) -> None:
        """Send a message as soon as the runner takes it."""
        self.outbox += to_frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what the runner takes now; the rest stays in `outbox`."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.outbox:
                del self.outbox[: self.channel.send(memoryview(self.outbox)[:_WRITE_NBYTES])]
                self.active_at = time.monotonic()

    def receive(self, *, is_last: bool = False) -> bool:
        """Read what it has sent, after its end all of it; False at the end of file."""
        with contextlib.suppress(BlockingIOError):
            for _ in itertools.count() if is_last else range(_READS_IN_A_ROW):
                is_open = self._inbox.receive()
                self.active_at = time.monotonic()
                if not is_open:
                    return False
        return True

    def messages(self) -> Iterator[FromRunner]:
        """Yield the messages that have arrived; update its state and times.

        Raises:
            ProtocolError: what it sent is not a message of this version.
        """
        while (frame := self._inbox.next_frame()) is not None:
            message = decode_from_runner(frame)
            if isinstance(message, Started):
                self.is_started = True
            elif isinstance(message, Answer):
                self.item_s = self.active_at - self.since
            self.since = self.active_at
            yield message

    def idle_s(self) -> float:
        """Return the seconds since it began, took or sent something."""
        return time.monotonic() - max(self.since, self.active_at)

    def kill(self, how: str | None = None) -> None:
        """Send SIGKILL; do not wait.

        Args:
            how: what errors say of its end; None if its item is not to blame.
        """
        self.how = how
        self.expect_end()
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def expect_end(self) -> None:
        """Note that its end must be reported soon; a second call changes nothing."""
        self.ending_since = min(self.ending_since, time.monotonic())

    def close(self) -> None:
        """Close its socket and its pidfd; a second call does nothing."""
        self.channel.close()
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)
