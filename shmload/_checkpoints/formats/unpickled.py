"""What torch's restricted unpickler makes of a file, remembered by the file's identity.

    this process                          shmload.workers.unpickle
        |  Unpickle + two descriptors ->      |     the file, and the one to write
        |  <- Answer                          |     the only one
        |  (end of file)                      |     the process leaves

The answer's file is one of safetensors: its header, and the tensors' bytes if they were asked for.
The unpickler runs once for a file: what it found, or why it refused, is kept in the cache. So a
second process attaches the file's segment without it.

Guarantee: torch is imported and the pickle is read in that process only. It ends with the call,
however the call ends, and with this process. Every wait has a deadline.
"""

import contextlib
import functools
import math
import os
import re
import select
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Self

import msgspec

from shmload._checkpoints.formats import safetensors
from shmload._checkpoints.header import Header
from shmload._checkpoints.identity import identify
from shmload._host.descriptors import Lock
from shmload._host.limits import says_no_memory
from shmload._host.memo import Memo
from shmload._host.owned import open_folder
from shmload._ipc import procs
from shmload._ipc.frames import Inbox, MessageReader, send
from shmload._settings import settings
from shmload.errors import ProtocolError, ShmloadError

MAX_WHY: Final = 400
"""Letters of a reason that is passed on."""

OF_ONE_MODEL: Final = ".bin"
"""The suffix of a file that has one model alone."""
# diffusers.utils.WEIGHTS_NAME, transformers.utils.WEIGHTS_NAME
BASE_NAMES: Final = {"diffusers": "diffusion_pytorch_model", "transformers": "pytorch_model"}
"""What the libraries call a model's weights, suffix aside."""

_ARCHIVE = b"PK\3\4"
_MODULE = "shmload.workers.unpickle"
_MAX_FRAME_NBYTES = 64 << 10
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

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self:
        """Return what the library that loads a file would take of it, by the file's name."""
        name = os.path.basename(os.fspath(path))
        return cls(
            may_be_nested=not name.endswith(OF_ONE_MODEL),
            # transformers builds models with the strides that it finds, and diffusers with those
            # that torch calls contiguous. Safetensors have none.
            may_be_strided=not name.startswith(BASE_NAMES["transformers"]),
            may_be_odd=not name.startswith(tuple(BASE_NAMES.values())),
        )


class Unpickle(msgspec.Struct, frozen=True, tag=True):
    """Unpickle the first file that comes with this message, and write the second."""

    wish: Wish
    has_data: bool
    """Write the tensors' bytes, too. If not, the file gets its length and they are a hole."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a file; without a reason the second one is written."""

    refusal: str = ""
    """Why torch refuses it, or what it has that has no place in safetensors."""
    failure: str = ""
    """Why the process failed; the file may be as good as any."""
    lacks_memory: bool = False
    """Whether that was for want of memory."""


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
    with contextlib.ExitStack() as closing:
        child = procs.start(
            _MODULE, channel_timeout_s=settings().stall_timeout_s, keeps_output=True
        )
        closing.callback(child.close)
        channel = child.channel
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
                child.kill()
                how = child.how_it_ended()
                raise Lost(how, timeout_s, lacked_memory=says_no_memory(child.output()))
        return _read_answer(frame)


# To be increased with every change of what is taken from a file, or of how it is written.
_VERSION = 2
# The unpickler of earlier releases could be made to run code (CVE-2025-32434).
_SAFE_SINCE = (2, 6)
# A process asks again for a file after so long, if the unpickler's process failed.
_ASK_AGAIN_S = 60.0
# Files that share a lock are asked for one after the other.
_LOCKS = 16


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What torch made of a file."""

    header: Header | None = None
    """That of the safetensors file that its tensors are written to; None if it was refused."""
    why: str = ""
    """Why it was refused."""


# What could not be remembered: by the key of the memo, with the time until which it is believed.
_untold: dict[str, tuple[Outcome, float]] = {}


def header_by_torch(fd: int, path: str | os.PathLike[str], wish: Wish) -> Outcome:
    """Return what torch makes of a file: remembered, or from a process that unpickles it.

    Args:
        fd: the open file; its position is not moved.
        path: of the file.
        wish: what the library would take of it.

    Returns:
        The header; or why there is none, which may be a failure of that process.

    Raises:
        OSError: the kernel refuses to say what the file is.
    """
    if not _is_torch_safe():
        since = ".".join(map(str, _SAFE_SINCE))
        return Outcome(why=f"torch {since} or later is needed to unpickle it without a risk")
    identity = identify(path, os.fstat(fd))
    memo = Memo("unpickled", Outcome, (_VERSION, identity.key, torch_version(), wish))
    if outcome := _recall(memo):
        return outcome
    until = math.inf
    try:
        with _turn(memo, fd):
            # Another process may have just asked.
            outcome = _recall(memo) or _describe(fd, path, wish)
        if identify(path, os.fstat(fd)).key != identity.key:
            return Outcome(why="it changed while it was unpickled")
    except (Lost, _ProcessFailed, ProtocolError, OSError) as exc:
        outcome, until = Outcome(why=str(exc)), time.monotonic() + _ASK_AGAIN_S
    if until < math.inf or not memo.write(outcome):
        _untold[memo.key] = outcome, until
    return outcome


def _recall(memo: Memo[Outcome]) -> Outcome | None:
    outcome, until = _untold.get(memo.key, (None, 0.0))
    return memo.read() or (outcome if time.monotonic() < until else None)


class _ProcessFailed(Exception):
    """No answer came, or none that can be used."""


@contextlib.contextmanager
def _turn(memo: Memo[Outcome], fd: int) -> Iterator[None]:
    """Let one process at a time ask for a file: the others find its answer.

    Raises:
        _ProcessFailed: another process asks for longer than it may.
    """
    timeout_s = answer_timeout_s(fd)
    name = f"lock-{zlib.crc32(memo.key.encode()) % _LOCKS:02}"
    try:
        with open_folder(memo.folder, make=True) as folder:
            lock = Lock.try_take(name, dir_fd=folder.fd, timeout_s=timeout_s)
    except OSError:  # a cache that cannot be written to
        yield
        return
    if lock is None:
        raise _ProcessFailed(f"another process unpickles it for more than {timeout_s:.0f} s")
    with lock:
        yield


def _describe(fd: int, path: str | os.PathLike[str], wish: Wish) -> Outcome:
    target_fd = os.memfd_create("shmload-header", os.MFD_CLOEXEC)
    try:
        answer = unpickle(fd, target_fd, wish, has_data=False)
        if answer.refusal:
            return Outcome(why=answer.refusal)
        if answer.failure:
            raise _ProcessFailed(f"the process that unpickles it failed: {answer.failure}")
        try:
            header = safetensors.read_header(target_fd, path)
        except ShmloadError as exc:
            raise _ProcessFailed(f"the process that unpickles it wrote no header: {exc}") from exc
    finally:
        os.close(target_fd)
    return Outcome(msgspec.structs.replace(header, metadata=None, is_unpickled=True))


@functools.cache
def torch_version() -> str:
    """Return the version of the installed torch, without importing it; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that many commands spare

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _is_torch_safe() -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", torch_version())
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _SAFE_SINCE
