"""The worker process: `python -P -m shmload.workers.main CHANNEL PARENT`.

Started by a coordinator with a Unix socket as descriptor CHANNEL and the coordinator's process id.

        +---------+  Ready   +---------+   Fill    +---------+
        | started | -------> | waiting | --------> | filling |
        +---------+          +---------+ <-------- +---------+
                                  |        Filled, Failed
              end of file, or the parent died: exit

Guarantee: a worker never outlives its coordinator by more than the piece it is filling, nor by the
time that a server takes for one. When the coordinator closes the socket, the worker reads end of
file. When the coordinator is killed while a forked child of it still holds the socket, only the
pidfd of the coordinator tells.
"""

import os
import select
import socket
import traceback

from shmload._host.frames import Inbox, send, serve_parent
from shmload._host.limits import is_lack_of_memory
from shmload.errors import ProtocolError
from shmload.workers.fill import Filler
from shmload.workers.messages import (
    VERSION,
    BytesRead,
    Failed,
    Fill,
    Filled,
    Ready,
    Reason,
    decode_to_worker,
)
from shmload.workers.reader import FillError, Readable, examine


def serve(channel: socket.socket, parent_fd: int) -> None:
    """Serve one coordinator until it is gone."""
    worker = _Worker(channel, parent_fd)
    send(channel, Ready(VERSION))
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(parent_fd, select.POLLIN)
    inbox = Inbox(channel)
    while True:
        while (frame := inbox.next_frame()) is not None:
            worker.handle(decode_to_worker(frame), inbox)
        ready = {fd for fd, _ in poll.poll()}
        if parent_fd in ready or not inbox.receive():
            return


class _Worker:
    """Carries out messages; owns the shards' descriptors."""

    def __init__(self, channel: socket.socket, parent_fd: int) -> None:
        self._channel = channel
        self._parent = select.poll()
        self._parent.register(parent_fd, select.POLLIN)
        self._filler = Filler()
        self._shards: dict[int, tuple[Readable, int]] = {}

    def handle(self, fill: Fill, inbox: Inbox) -> None:
        if fill.shard not in self._shards:
            if len(inbox.fds) < 2:
                raise ProtocolError("the first piece of a shard came without its two descriptors")
            fds = inbox.fds.pop(0), inbox.fds.pop(0)
            self._shards[fill.shard] = examine(_reopen(fds[0]), fill.workers), fds[1]
        send(self._channel, self._fill(fill))

    def _fill(self, fill: Fill) -> Filled | Failed:
        shard, part_fd = self._shards[fill.shard]
        try:
            digest = self._filler.fill(shard, part_fd, fill.runs, self._report)
        except FillError as exc:
            return Failed(fill.shard, fill.piece, exc.reason, str(exc), exc.offset)
        except Exception as exc:  # outermost loop: the coordinator must learn of any error
            reason = Reason.NO_MEMORY if is_lack_of_memory(exc) else Reason.INTERNAL
            return Failed(fill.shard, fill.piece, reason, traceback.format_exc())
        return Filled(fill.shard, fill.piece, digest)

    def _report(self, nbytes: int) -> None:
        if self._parent.poll(0):
            os._exit(0)  # a server could keep the threads that read waiting for minutes
        send(self._channel, BytesRead(nbytes))


def _reopen(fd: int) -> int:
    """Open a file again, for a read position and a read-ahead of its own.

    Readers that share an open file description look random to the kernel's read-ahead. The path in
    /proc leads to the same file even if another has its name now. A file that this process may not
    open is read through the descriptor that came.
    """
    try:
        fresh = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return fd
    os.close(fd)
    return fresh


if __name__ == "__main__":
    serve_parent(serve)
