"""What torch's restricted unpickler makes of a file, remembered by the file's identity.

The unpickler runs once for a file: what it found, or why it refused, is kept in the cache. So a
second process attaches the file's segment without it.
"""

import contextlib
import functools
import importlib.metadata
import os
import re
import time
import zlib
from collections.abc import Iterator

import msgspec

from shmload._checkpoints.formats import safetensors
from shmload._checkpoints.formats.unpickling import (
    Failed,
    Lost,
    Refused,
    Wish,
    answer_timeout_s,
    unpickle,
)
from shmload._checkpoints.header import Header
from shmload._checkpoints.identity import Identity, identify
from shmload._host.descriptors import Descriptor
from shmload._host.linux import wait_lock
from shmload._host.memo import Memo
from shmload._host.owned import open_folder
from shmload.errors import ProtocolError, ShmloadError

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


# By the key of the memo that would remember them.
_failed: dict[str, tuple[str, float]] = {}
_unwritten: dict[str, Outcome] = {}


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
    memo = _memo(identity, wish)
    return _recall(memo) or _ask(fd, path, wish, identity, memo)


def _ask(
    fd: int,
    path: str | os.PathLike[str],
    wish: Wish,
    identity: Identity,
    memo: Memo[Outcome],
) -> Outcome:
    why, at = _failed.get(memo.key, ("", 0.0))
    if why and time.monotonic() < at + _ASK_AGAIN_S:
        return Outcome(why=why)
    try:
        with _turn(memo, fd):
            outcome = _recall(memo)  # another process has just asked
            if outcome:
                return outcome
            outcome = _describe(fd, path, wish)
    except (Lost, _ProcessFailed, ProtocolError, OSError) as exc:
        _failed[memo.key] = (str(exc), time.monotonic())
        return Outcome(why=str(exc))
    if identify(path, os.fstat(fd)).key != identity.key:
        return Outcome(why="it changed while it was unpickled")
    _failed.pop(memo.key, None)
    if not memo.write(outcome):
        _unwritten[memo.key] = outcome
    return outcome


class _ProcessFailed(Exception):
    """No answer came, or none that can be used."""


@contextlib.contextmanager
def _turn(memo: Memo[Outcome], fd: int) -> Iterator[None]:
    """Let one process at a time ask for a file: the others find its answer.

    Raises:
        _ProcessFailed: another process asks for longer than it may.
    """
    try:
        with open_folder(memo.folder, make=True) as folder:
            lock = f"lock-{zlib.crc32(memo.key.encode()) % _LOCKS:02}"
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock_fd = os.open(lock, flags, 0o600, dir_fd=folder.fd)
    except OSError:  # a cache that cannot be written to
        yield
        return
    with Descriptor(lock_fd):
        timeout_s = answer_timeout_s(fd)
        if not wait_lock(lock_fd, exclusive=True, timeout_s=timeout_s):
            raise _ProcessFailed(f"another process unpickles it for more than {timeout_s:.0f} s")
        yield


def _describe(fd: int, path: str | os.PathLike[str], wish: Wish) -> Outcome:
    target_fd = os.memfd_create("shmload-header", os.MFD_CLOEXEC)
    try:
        match unpickle(fd, target_fd, wish, has_data=False):
            case Refused(why):
                return Outcome(why=why)
            case Failed(detail):
                raise _ProcessFailed(f"the process that unpickles it failed: {detail}")
        try:
            header = safetensors.read_header(target_fd, path)
        except ShmloadError as exc:
            raise _ProcessFailed(f"the process that unpickles it wrote no header: {exc}") from exc
    finally:
        os.close(target_fd)
    return Outcome(msgspec.structs.replace(header, metadata=None, is_unpickled=True))


def _memo(identity: Identity, wish: Wish) -> Memo[Outcome]:
    return Memo("unpickled", Outcome, (_VERSION, identity.key, torch_version(), wish))


def _recall(memo: Memo[Outcome]) -> Outcome | None:
    return memo.read() or _unwritten.get(memo.key)


@functools.cache
def torch_version() -> str:
    """Return the version of the installed torch, without importing it; empty if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_torch_safe() -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", torch_version())
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _SAFE_SINCE
