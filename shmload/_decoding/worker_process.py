"""The coordinator's end of one worker process: start, talk, watch, end.

Owns the child.
"""

import select
import sys
import time
from collections import deque
from collections.abc import Iterator

from shmload._host import procs
from shmload._host.frames import Inbox, send
from shmload._host.limits import process_refused, says_no_memory
from shmload._settings import settings
from shmload.errors import ProtocolError, WorkerError
from shmload.workers.messages import (
    VERSION,
    Failed,
    Fill,
    Filled,
    FromWorker,
    Ready,
    decode_from_worker,
)


class WorkerProcess:
    """A child that runs `shmload.workers.main`, from here until `close`."""

    def __init__(self) -> None:
        self._opened: set[int] = set()
        self.fills: deque[Fill] = deque()
        """Handed out and not yet answered, oldest first."""
        self.is_ready = False
        """Whether it has started."""
        self.active_at = time.monotonic()
        """Time of its latest message, or of its first piece; `time.monotonic`, in seconds."""
        self.began_at = self.active_at
        """Time at which it began with its oldest piece."""
        try:
            self.child = procs.start(
                "shmload.workers.main",
                channel_timeout_s=settings().stall_timeout_s,
            )
        except OSError as exc:
            refused = process_refused("a worker process", exc)
            if refused:
                raise refused from exc
            raise WorkerError(
                f"a worker could not be started: {exc}; sys.executable must be a Python "
                "interpreter, with processes, memory and descriptors to spare"
            ) from exc
        self.channel = self.child.channel
        self._inbox = Inbox(self.channel)

    def give(self, fill: Fill, source: int, target: int) -> None:
        """Hand out a piece, with the shard's descriptors if the worker lacks them.

        Args:
            fill: the piece.
            source: descriptor of the shard.
            target: descriptor of the part.
        """
        if not self.fills:
            self.active_at = self.began_at = time.monotonic()
        # Before sending: if that fails, the piece must not get lost.
        self.fills.append(fill)
        send(self.channel, fill, () if fill.shard in self._opened else (source, target))
        self._opened.add(fill.shard)

    def has_news(self) -> bool:
        """Tell whether a message of it is still unread."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self) -> Iterator[FromWorker]:
        """Yield the messages that have arrived; none if the worker is gone.

        Raises:
            ProtocolError: a frame is no message, or an answer is for a piece that the worker does
                not have.
            WorkerError: the worker has another version.
        """
        self._inbox.receive()
        while (frame := self._inbox.next_frame()) is not None:
            message = decode_from_worker(frame)
            self.active_at = time.monotonic()
            match message:
                case Ready(version):
                    if version != VERSION:
                        raise WorkerError(f"the worker speaks version {version}, not {VERSION}")
                    self.is_ready = True
                case Filled(shard, piece) | Failed(shard, piece):
                    first = self.fills[0] if self.fills else None
                    if first is None or (first.shard, first.piece) != (shard, piece):
                        raise ProtocolError(f"an answer for piece {piece} that was not asked for")
                    self.fills.popleft()
            yield message

    @property
    def lacked_memory(self) -> bool:
        """Whether its last output says so; a library may end the process then."""
        return says_no_memory(self.child.output())

    def start_failure(self) -> WorkerError:
        """Return the error for a child that ended before it was ready."""
        return self.with_output(
            WorkerError(
                f"a worker could not start ({self.child.how_it_ended()}): run "
                f"`{sys.executable} -P -c 'import shmload.workers.main'` to see why"
            )
        )

    def with_output(self, error: WorkerError) -> WorkerError:
        """Return an error with a note of what the child has printed; not after `close`."""
        if tail := self.child.output():
            error.add_note("its output: " + tail)
        return error

    def close(self) -> None:
        """Kill the child and reap it; a second call is fine."""
        self.child.close()
