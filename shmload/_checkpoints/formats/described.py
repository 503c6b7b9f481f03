"""What a library says of a file, asked for in a process of its own and remembered.

    python -P -m shmload._checkpoints.formats.described CHANNEL PARENT

The library's import takes up to a second. So what it says is kept: in the process that loads, and
on disk for the next one. Several files are asked for in one process. It gets a descriptor with each
question, and answers where the file's tensors lie; no tensor's bytes are read.

Guarantee: an answer is for the file as it was when it was asked about, and describes tensors inside
it. A library that does not answer in time is ended. A file that makes a library hang, crash or use
up memory does so in that process alone, which ends when its parent ends or asks no more.
"""

import contextlib
import importlib
import os
import resource
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from shmload._checkpoints.header import Header, TensorSpec, wrong_in
from shmload._host import procs
from shmload._host.files import Fingerprint
from shmload._host.frames import Inbox, MessageReader, send, serve_parent
from shmload._host.limits import is_lack_of_memory
from shmload._host.memo import Memo
from shmload._settings import settings
from shmload._wording import format_nbytes
from shmload.errors import LibraryError, ProtocolError

# To be increased when files are described in another way.
_VERSION = 2
_MODULE = "shmload._checkpoints.formats.described"
# Files that this process keeps answers for.
_MOST_KEPT = 256
# The most that the segment may be larger than the file, in which tensors may share bytes: T5-small
# has four names for one embedding, so its segment is 1.8 times as large. Small ones are allowed.
_MOST_TIMES = 4
_ALWAYS_NBYTES = 64 << 20

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
    """Whether later processes may keep to it. After a `RuntimeError` they ask anew: torch raises
    one for an error of the disk, too."""


Answer = Described | Refused

_decode = MessageReader[Describe](Describe, "the process that loads")
_decode_answer = MessageReader[Answer](Answer, "the process that describes files")


class Unread(Exception):
    """A file has something that the library reads and shmload does not."""


# In the process that loads ------------------------------------------------------------------------

_Facts = tuple[int, str, str, Fingerprint]
_kept: dict[_Facts, Answer] = {}


class NotDescribed(Exception):
    """A library does not say what is in a file; str says why."""


def read_described(fd: int, module: str, package: str) -> Header:
    """Return the header of a file as its library describes it.

    Args:
        fd: the open file; its position is not moved.
        module: of the format, which has `describe`.
        package: what pip calls the library.

    Raises:
        NotDescribed: the library refuses the file or has ended, or the tensors that it names are
            not inside the file, or share far more bytes than it has.
        LibraryError: the library is not installed.
    """
    (answer,) = describe_all([fd], module, package)
    if isinstance(answer, Refused):
        raise NotDescribed(answer.why)
    header = Header(tensors=answer.tensors, metadata=None, data_offset=0)
    nbytes = os.fstat(fd).st_size
    for tensor in header.tensors:
        if wrong := wrong_in(tensor):
            raise NotDescribed(wrong)
        if not 0 <= tensor.begin <= tensor.end <= nbytes:
            raise NotDescribed(f"tensor {tensor.name!r} does not lie inside the file")
    # A segment has bytes for each tensor; in the file, tensors of any size may share a few bytes.
    if header.data_nbytes > max(_MOST_TIMES * nbytes, _ALWAYS_NBYTES):
        apart = format_nbytes(header.data_nbytes)
        raise NotDescribed(f"its tensors share bytes, and take {apart} apart")
    return header


def describe_all(fds: Sequence[int], module: str, package: str) -> list[Answer]:
    """Return what a library says of some files; ask it in one process for those not known.

    Args:
        fds: the open files.
        module: as for `read_described`.
        package: as for `read_described`.

    Raises:
        LibraryError: the library is not installed.
    """
    try:
        library = f"{package} {version(package)}"
    except PackageNotFoundError as exc:
        raise LibraryError(
            f"a file of {package} needs shmload[{package}], which is not installed; `pip install "
            f"shmload[{package}]`"
        ) from exc
    answers: list[Answer] = []
    with contextlib.ExitStack() as ending:
        process = None
        for fd in fds:
            facts = (_VERSION, module, library, Fingerprint.of(os.fstat(fd)))
            memo = Memo[Answer]("headers", Answer, facts)  # type: ignore[arg-type]  # a union
            answer = _kept.get(facts) or memo.read()
            if answer is None:
                try:
                    process = process or ending.enter_context(contextlib.closing(_start()))
                    answer = _ask(process, module, fd)
                except (OSError, EOFError, ProtocolError) as exc:
                    answers.append(Refused(_why_no_answer(process, exc)))
                    process = None
                    continue
                if isinstance(answer, Described) or answer.is_lasting:
                    memo.write(answer)
            _keep(facts, answer)
            answers.append(answer)
    return answers


def _keep(facts: _Facts, answer: Answer) -> None:
    while len(_kept) >= _MOST_KEPT:
        _kept.pop(next(iter(_kept)), None)
    _kept[facts] = answer


def _start() -> procs.Child:
    return procs.start(_MODULE, channel_timeout_s=settings().stall_timeout_s)


def _ask(process: procs.Child, module: str, fd: int) -> Answer:
    """Return a process's answer about a file.

    Raises:
        OSError, EOFError, ProtocolError: it does not answer in time, has ended, or says nonsense.
    """
    send(process.channel, Describe(module), (fd,))  # type: ignore[arg-type]  # one of its names
    inbox = Inbox(process.channel)
    while (frame := inbox.next_frame()) is None:
        if not inbox.receive():
            raise EOFError
    return _decode_answer(frame)


def _why_no_answer(process: procs.Child | None, exc: Exception) -> str:
    """Say why there is no answer; end the process."""
    if process is None:
        return f"the process that reads it cannot be started: {exc}"
    if isinstance(exc, TimeoutError):
        process.close()
        return f"its library has said nothing for {settings().stall_timeout_s:g} s"
    last = process.output().rpartition("\n")[2]
    return f"the process that reads it ended by {process.close()}" + (f": {last}" if last else "")


# In the process that describes --------------------------------------------------------------------


def serve(channel: socket.socket, parent_fd: int) -> None:
    """Answer one question after the other."""
    procs.die_with_parent()
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(ValueError):  # the hard limit is lower already
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_NBYTES, hard))
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
    except Exception as exc:  # whatever a library raises for a damaged file
        if isinstance(exc, OSError) or is_lack_of_memory(exc):
            raise  # says nothing of the file: this process ends
        why = next(iter(str(exc).splitlines()), type(exc).__name__)
        return Refused(why, is_lasting=not isinstance(exc, RuntimeError))


if __name__ == "__main__":
    serve_parent(serve)
