"""The program that unpickles one file: `python -P -m shmload.workers.unpickle CHANNEL PARENT`.

Started by `_checkpoints.formats.unpickled`, with a Unix socket as descriptor CHANNEL and the id of
the process that asks.

Guarantee: the process ends with the thread that asks, which waits for the answer.
"""

import os
import signal
import sys

from shmload._checkpoints.formats.unpickled import read_unpickle
from shmload._ipc.frames import Inbox, send, take_channel
from shmload._ipc.procs import die_with_parent
from shmload.errors import ProtocolError


def main(channel_fd: int, parent: int) -> None:
    """Answer one request."""
    # Ctrl-C goes to the whole foreground group; the one who asks decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:
        return
    channel = take_channel(channel_fd)
    inbox = Inbox(channel)
    while (frame := inbox.next_frame()) is None:
        if not inbox.receive():
            return
    request = read_unpickle(frame)
    if len(inbox.fds) != 2:
        raise ProtocolError("a file was to be unpickled without its two descriptors")
    # Not at the top: it imports torch, and the parent may die meanwhile.
    from shmload.workers.tensors import unpickle_to

    fd, target_fd = inbox.fds
    send(channel, unpickle_to(target_fd, fd, request))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the one who asked has gone while we answered
