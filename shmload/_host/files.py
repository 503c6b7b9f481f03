"""Files that are written completely or not at all."""

import contextlib
import os
from collections.abc import Iterator
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"
"""Temporary files are called NAME.8HEXDIGITS plus this suffix."""


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, durable: bool = False, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Write a file so that readers see all of it, or the file that was there before.

    The file gets its name when the block ends. If the block raises, nothing changes; a process that
    is killed in it leaves a temporary file in the same directory.

    Args:
        path: in a directory that exists.
        durable: return only when the file and its name survive a loss of power.
        mode: permissions of the file, before the umask.

    Raises:
        OSError: it cannot be written.
    """
    temporary = f"{os.fspath(path)}.{os.urandom(4).hex()}{TEMPORARY_SUFFIX}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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
        sync_directory(os.path.dirname(os.path.abspath(path)))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Write a directory's names to disk, so that they survive a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
