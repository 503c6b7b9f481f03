"""A runner as its job sees it: its place, its socket, its pidfd, and what is still to be sent."""

import contextlib
import math
import os
import signal
import socket
import time

from shmload._ipc.frames import Inbox, to_frame
from shmload.integrations._jobs.messages import (
    MAX_FRAME_NBYTES,
    Ended,
    Raised,
    Returned,
    Started,
    ToRunner,
)

# Of a quarter of a MiB each, before it is the others' turn.
_READS_IN_A_ROW = 64


class RunnerProcess:
    """One runner; owns its socket and its pidfd."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self.number = number
        self.channel = channel
        self.inbox = Inbox(channel, MAX_FRAME_NBYTES)
        self.outbox = bytearray()
        self.pid = 0
        self.pidfd = -1
        self.is_started = False
        self.is_silent = False
        """Whether nothing more will come from it."""
        self.how: str | None = None
        """How it ended, or why it was killed; None before, and if it was not its own doing."""
        self.since = time.monotonic()
        """When it has begun with what it does now, by the monotonic clock, in seconds."""
        self.active_at = self.since
        """When it last took or said anything, by the same clock."""
        self.ending_since = math.inf
        """When it was killed or fell silent, by the same clock: its end is to be heard of soon."""
        self.item_s = math.inf
        """How long it took for the item before, in seconds."""

    def post(self, message: ToRunner) -> None:
        """Have a message go out as soon as the runner takes it."""
        self.outbox += to_frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what the runner takes now; the rest stays."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.outbox:
                del self.outbox[: self.channel.send(memoryview(self.outbox)[: 1 << 20])]
                self.active_at = time.monotonic()

    def receive(self) -> bool:
        """Take in what it has sent; False if nothing more will come."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_IN_A_ROW):
                is_there = self.inbox.receive()
                self.active_at = time.monotonic()
                if not is_there:
                    return False
        return True

    def idle_s(self) -> float:
        """Return for how long it has neither begun, taken nor said anything, in seconds."""
        return time.monotonic() - max(self.since, self.active_at)

    def kill(self, how: str | None = None) -> None:
        """Kill it; that it has ended is told later.

        Args:
            how: what is to be said of its end, instead of what ended it; None for nothing else.
        """
        self.how = how
        self.expect_end()
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def expect_end(self) -> None:
        """Take note that its end is to be heard of from now on; again is fine."""
        self.ending_since = min(self.ending_since, time.monotonic())

    def close(self) -> None:
        """Give back what it takes here; again is fine."""
        self.channel.close()
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)


Answer = Returned | Raised
Event = tuple[RunnerProcess, Started | Answer | Ended]
"""What a runner has said, or that it has ended."""
