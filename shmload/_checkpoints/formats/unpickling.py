"""Asks torch's restricted unpickler, in a process of its own, for what a file of PyTorch has.

    this process                          shmload.workers.unpickle
        |  Unpickle + two descriptors ->      |     the file, and the one to write
        |  <- Unpickled | Refused | Failed    |     the only answer
        |  (end of file)                      |     the process leaves

The answer's file is one of safetensors: its header, and the tensors' bytes if they were asked for.

Guarantee: torch is imported and the pickle is read in that process only. It ends with the call,
however the call ends, and with this process. Every wait has a deadline.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import Final

import msgspec

from shmload._host.limits import says_no_memory
from shmload._ipc.child import child_environment, start_with_channel
from shmload._ipc.frames import Inbox, MessageReader, send
from shmload._settings import settings

MAX_WHY: Final = 400
"""Letters of a reason that is passed on."""

_ARCHIVE = b"PK\3\4"
_MODULE = "shmload.workers.unpickle"
_MAX_FRAME_NBYTES = 64 << 10
_OUTPUT_TAIL_NBYTES = 4000
# How often a caller is asked whether it still waits.
_POLL_S = 0.2
# A file of the older form is read by torch with small reads. No disk worth loading from is slower.
_SLOWEST_NBYTES_S = 4 << 20


class Wish(msgspec.Struct, frozen=True):
    """What a library would take of a file."""

    may_be_nested: bool
    """It may have a whole pipeline, not one model alone."""
    may_be_strided: bool
    """The library makes tensors contiguous that are not, or it is no library that loads it."""
    may_be_odd: bool
    """Dimensions of one element may have any strides, which libraries keep."""


class Unpickle(msgspec.Struct, frozen=True, tag=True):
    """Unpickle the first file that comes with this message, and write the second."""

    wish: Wish
    has_data: bool
    """Write the tensors' bytes, too. If not, the file gets its length and they are a hole."""


class Unpickled(msgspec.Struct, frozen=True, tag=True):
    """The file is written."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """torch refuses the file, or it has something that has no place in safetensors."""

    why: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process failed; the file may be as good as any."""

    detail: str
    lacks_memory: bool


Answer = Unpickled | Refused | Failed

read_unpickle = MessageReader[Unpickle](Unpickle, "a load")
_read_answer = MessageReader[Answer](Answer, "the process that unpickles")


def is_archive(fd: int) -> bool:
    """Tell whether an open file is a zip archive, which torch maps; it reads all of others."""
    return os.pread(fd, len(_ARCHIVE), 0) == _ARCHIVE


def answer_timeout_s(fd: int) -> float:
    """Return how long the process may take for an open file, in seconds."""
    return settings().stall_timeout_s + os.fstat(fd).st_size / _SLOWEST_NBYTES_S


class Lost(Exception):
    """The process ended, or did not answer in time.

    Attributes:
        how: how it ended; None if it did not answer.
        timeout_s: how long it had, in seconds.
        lacked_memory: whether its last words say so.
    """

    def __init__(self, how: str | None, timeout_s: float, *, lacked_memory: bool = False) -> None:
        said = f"ended by {how}" if how else f"did not answer in {timeout_s:.0f} s"
        super().__init__(f"the process that unpickles it {said}")
        self.how = how
        self.timeout_s = timeout_s
        self.lacked_memory = lacked_memory


def unpickle(
    fd: int,
    target_fd: int,
    wish: Wish,
    *,
    has_data: bool,
    go_on: Callable[[], None] = lambda: None,
) -> Answer:
    """Have a file unpickled; blocks until the answer.

    Args:
        fd: the open file; its position is not moved.
        target_fd: an empty file, open to write.
        wish: what the library would take.
        has_data: write the tensors' bytes, too, and not the header alone.
        go_on: called several times a second; what it raises ends the process and the call.

    Raises:
        Lost: the process died or stalled.
        ProtocolError: it sent something else than an answer.
        OSError: it cannot be started.
    """
    timeout_s = answer_timeout_s(fd)
    ends_at = time.monotonic() + timeout_s
    output_fd = os.memfd_create("shmload-unpickle-output", os.MFD_CLOEXEC)
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, output_fd)
        child, channel = start_with_channel(
            _MODULE,
            timeout_s=settings().stall_timeout_s,
            env=child_environment(),
            stdout=output_fd,
            stderr=output_fd,
        )
        closing.callback(child.close)
        closing.enter_context(channel)
        inbox = Inbox(channel, _MAX_FRAME_NBYTES)
        closing.callback(inbox.close)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is read below
            send(channel, Unpickle(wish, has_data), (fd, target_fd))
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        while (frame := inbox.next_frame()) is None:
            go_on()
            if (left_s := ends_at - time.monotonic()) <= 0:
                raise Lost(None, timeout_s)
            if poll.poll(min(left_s, _POLL_S) * 1000) and not inbox.receive():
                how = child.close()
                raise Lost(how, timeout_s, lacked_memory=says_no_memory(_tail(output_fd)))
        return _read_answer(frame)


def _tail(output_fd: int) -> str:
    size = os.fstat(output_fd).st_size
    tail = os.pread(output_fd, _OUTPUT_TAIL_NBYTES, max(0, size - _OUTPUT_TAIL_NBYTES))
    return tail.decode(errors="replace")
