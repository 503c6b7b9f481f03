"""Files on disks: opened as sources, read ahead, written completely or not at all."""

import contextlib
import errno
import fcntl
import os
import shutil
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

    The file gets its name when the block ends. If the block raises, nothing changes. If the process
    is killed in it, the kernel frees the file, which has no name yet. A temporary file is left in
    the directory on a file system without such files (NFS, for one), or if the kill comes between
    the last two steps, when the file has its temporary name.

    Args:
        path: in a directory that exists.
        durable: return only when the file and its name survive a loss of power.
        mode: permissions of the file, before the umask.

    Raises:
        OSError: it cannot be written.
    """
    temporary = f"{os.fspath(path)}.{os.urandom(4).hex()}{TEMPORARY_SUFFIX}"
    folder = os.path.dirname(os.path.abspath(path))
    fd = _open_nameless(folder, mode)
    is_nameless = fd is not None
    if fd is None:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(fd)
            if is_nameless:
                _give_name(fd, temporary, mode, durable=durable)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(folder)


def plain_only(path: str, flags: int) -> int:
    """Open a regular file: an `opener` for `open`.

    Raises:
        OSError: it cannot be opened, or is something else: a pipe, say, which would be waited for.
    """
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def _open_nameless(folder: str, mode: int) -> int | None:
    """Open a new file without a name; None if that fails, as it does on NFS."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, mode)
    except OSError:  # the caller finds out whether a file with a name fails, too
        return None


def _give_name(fd: int, path: str, mode: int, *, durable: bool) -> None:
    """Give a file that has no name the name `path`.

    Raises:
        OSError: it cannot be done.
    """
    try:
        # With a descriptor Python calls linkat, which follows the link of /proc; link does not.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        return
    except OSError:  # without /proc, in some sandboxes, and across mount namespaces
        copy = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(copy, "wb") as target, open(os.dup(fd), "rb") as source:
        source.seek(0)
        shutil.copyfileobj(source, target)
        target.flush()
        if durable:
            os.fsync(copy)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Write a directory's names to disk, so that they survive a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_source(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading; never blocks on a FIFO or a terminal.

    Raises:
        ShardMissing: there is no such file.
        ShardUnreadable: it is not a regular file, or may not be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise ShardMissing(path) from exc
    except OSError as exc:
        if exc.errno == errno.EMFILE:
            raise too_many_files(path) from exc
        raise ShardUnreadable(path, exc.strerror or str(exc), exc.errno or errno.EIO) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ShardUnreadable(path, "it is not a regular file")
    return fd


def is_writable(fd: int) -> bool:
    """Tell whether a descriptor may write, at any offset."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    return flags & os.O_ACCMODE == os.O_RDWR and not flags & (os.O_APPEND | os.O_PATH)


def is_cached(fd: int, nbytes: int) -> bool:
    """Tell whether a file seems to be in the page cache; samples eight places, reads no disk."""
    for place in range(8):
        try:
            os.preadv(fd, [bytearray(1)], nbytes * place // 8, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:  # a file system that cannot tell, such as tmpfs
            return True  # reading ahead gains nothing there
    return True


def read_ahead(fd: int) -> None:
    """Ask the kernel to read a whole file into the page cache; return at once."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
