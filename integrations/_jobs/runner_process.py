"""A runner as its job sees it: its place, its socket, its pidfd, and what is still to be sent."""

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Iterator

from shmload._ipc.frames import Inbox, to_frame
from shmload.integrations._jobs.messages import (
    MAX_FRAME_NBYTES,
    Ended,
    FromRunner,
    ItemAnswer,
    Raised,
    Returned,
    Started,
    ToRunner,
    decode_from_runner,
)

# A read takes 256 KiB at most; after so many it is another process's turn.
_READS_IN_A_ROW = 64
_WRITE_NBYTES = 1 << 20


class RunnerProcess:
    """One runner; owns its socket and its pidfd. Times are of the monotonic clock, in seconds.

    Args:
        place: its place in the crew, from 0.
        channel: a socket to it, which must not block.
    """

    def __init__(self, place: int, channel: socket.socket) -> None:
        self.place = place
        self.channel = channel
        self.inbox = Inbox(channel, MAX_FRAME_NBYTES)
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

    def receive(self) -> bool:
        """Read what it has sent; False at the end of file."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_IN_A_ROW):
                is_open = self.inbox.receive()
                self.active_at = time.monotonic()
                if not is_open:
                    return False
        return True

    def receive_rest(self) -> None:
        """Read all that it has sent before it ended."""
        with contextlib.suppress(BlockingIOError):
            while self.inbox.receive():
                pass

    def messages(self) -> Iterator[FromRunner]:
        """Yield the messages that have arrived; update its state and times.

        Raises:
            ProtocolError: what it sent is not a message of this version.
        """
        while (frame := self.inbox.next_frame()) is not None:
            message = decode_from_runner(frame)
            match message:
                case Started():
                    self.is_started = True
                case Returned() | Raised():
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


Event = tuple[RunnerProcess, Started | ItemAnswer | Ended]
"""What a runner has sent, or that it has ended."""
