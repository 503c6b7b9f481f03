"""Files on disks: opened as sources, read ahead, replaced whole or not at all."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from shmload._host.limits import too_many_files
from shmload.errors import ShardMissing, ShardUnreadable

TEMPORARY_SUFFIX = ".tmp"
"""Temporary files are called NAME.8HEXDIGITS plus this suffix."""


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, durable: bool = False, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Write a file so that readers see all of it, or the file that was there before.

    The file gets its name when the block ends. If the block raises, nothing changes. A process that
    is killed in it leaves a temporary file in the directory.

    Args:
        path: in a directory that exists.
        durable: return only when the file and its name survive a loss of power.
        mode: permissions of the file, before the umask.

    Raises:
        OSError: it cannot be written.
    """
    temporary = f"{os.fspath(path)}.{os.urandom(4).hex()}{TEMPORARY_SUFFIX}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def open_source(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading; never blocks on a FIFO or a terminal.

    Raises:
        ShardMissing: there is no such file.
        ShardUnreadable: it is not a regular file, or may not be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise ShardMissing(
            f"{path} does not exist; download the checkpoint again", path=path
        ) from exc
    except OSError as exc:
        if exc.errno == errno.EMFILE:
            raise too_many_files(path) from exc
        raise unreadable(path, exc.strerror or str(exc), exc.errno) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise unreadable(path, "it is not a regular file")
    return fd


def read_ahead(fd: int) -> None:
    """Ask the kernel to read a whole file into the page cache; return at once."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def unreadable(
    path: str | os.PathLike[str], reason: str, number: int | None = None
) -> ShardUnreadable:
    """Return the error for a file, or an object at a URL, that cannot be read.

    Args:
        path: of the file, or the URL.
        reason: what the kernel or the server says.
        number: the kernel's number of it.
    """
    remedy = "check its permissions and the disk it is on"
    if "://" in str(path):
        remedy = "check the network and the credentials, and load again"
    return ShardUnreadable(
        f"{path} cannot be read: {reason}; {remedy}", path=path, errno=number or errno.EIO
    )
