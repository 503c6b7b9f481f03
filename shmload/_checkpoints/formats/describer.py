"""The process in which the library that owns a format says what is in a file.

    python -P -m shmload._checkpoints.formats.describer CHANNEL PARENT

It gets a descriptor with each question, and answers where the file's tensors lie. No tensor's bytes
are read.

Guarantee: a file that makes a library hang, crash or use up memory does so in this process alone,
which ends when its parent ends or asks no more.
"""

import importlib
import os
import resource
import socket
from pathlib import Path
from typing import Literal

import msgspec

from shmload._checkpoints.header import TensorSpec
from shmload._host.frames import Inbox, MessageReader, send, serve_parent
from shmload._host.procs import die_with_parent

# Without the file, which is mapped at most. The imports of torch take a tenth of it.
_MOST_NBYTES = 16 << 30
_LIBRARIES = {"pytorch": "torch", "gguf": "gguf"}


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Describe the file whose descriptor comes with this message."""

    module: Literal["pytorch", "gguf"]
    """The format's module."""


class Described(msgspec.Struct, frozen=True, tag=True):
    """The tensors of a file; their offsets count from its front."""

    tensors: tuple[TensorSpec, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The library refuses the file, or has not said where its tensors lie."""

    why: str
    is_lasting: bool = True
    """Whether it will say so each time; torch raises a `RuntimeError` also for a lack of memory."""


Answer = Described | Refused

_decode = MessageReader[Describe](Describe, "the process that loads")
decode_answer = MessageReader[Answer](Answer, "the process that describes files")


class Unread(Exception):
    """A file has something that the library reads and shmload does not."""


def serve(channel: socket.socket, parent_fd: int) -> None:
    """Answer one question after the other."""
    die_with_parent()
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_NBYTES, resource.RLIM_INFINITY))
    inbox = Inbox(channel)
    while inbox.receive():
        while (frame := inbox.next_frame()) is not None:
            asked = _decode(frame)
            fd = inbox.fds.pop(0)
            # This opens it anew: the other process's position in the file stays.
            send(channel, _answer(asked.module, f"/proc/self/fd/{fd}"))
            os.close(fd)


def _answer(module: str, path: str) -> Answer:
    # Not at the top: each names what it asks this process for.
    from shmload._checkpoints.formats import gguf, pytorch

    format_module = {"gguf": gguf, "pytorch": pytorch}[module]
    importlib.import_module(_LIBRARIES[module])  # an error here says nothing of the file
    try:
        return Described(tuple(format_module.describe(path)))
    except (MemoryError, OSError):  # says nothing of the file: this process ends
        raise
    except Exception as exc:  # whatever a library raises for a damaged file
        why = next(iter(str(exc).splitlines()), type(exc).__name__)
        return Refused(why, is_lasting=not isinstance(exc, RuntimeError))


if __name__ == "__main__":
    serve_parent(serve)
