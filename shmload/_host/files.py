"""Files on disks: opened as sources, read ahead, replaced whole, and whether they have changed.

Guarantee: a file that was written to or replaced since has another fingerprint, whatever size and
times it was given: no program sets the time at which the kernel has changed an inode. Not so a
write through a shared mapping to a page that was written to before: the kernel notes no time. Links
are followed, as loads follow them.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Self

from shmload._host.limits import too_many_files
from shmload.errors import ShardMissing, ShardUnreadable

TEMPORARY_FILES = "*." + "[0-9a-f]" * 8 + ".tmp"
"""A glob pattern of the temporary files that `replacing` makes."""


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
    temporary = f"{os.fspath(path)}.{os.urandom(4).hex()}.tmp"
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


# Whether one is still what it was -----------------------------------------------------------------


class Fingerprint(NamedTuple):
    """What stat says of a file, as far as a change of the file changes it."""

    nbytes: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """Return the fingerprint in what stat has said of a file."""
        return cls(found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def place(self) -> tuple[int, int]:
        """Device and inode: what two names of one file have in common."""
        return self.device, self.inode


def fingerprint(path: str | os.PathLike[str]) -> Fingerprint | None:
    """Return the fingerprint of what a path leads to; None if there is nothing."""
    try:
        return Fingerprint.of(os.stat(path))
    except OSError:
        return None


def files_below(folder: str | os.PathLike[str]) -> dict[str, Fingerprint | None]:
    """Return the fingerprint of each file below a folder, by its path.

    Folders that are links are entered, too, each folder once: a further name of it stands in the
    result itself. So does a link to nothing, with None.
    """
    return dict(_walk(os.fspath(folder), set()))


def _walk(folder: str, entered: set[tuple[int, int]]) -> Iterator[tuple[str, Fingerprint | None]]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        found = fingerprint(path)
        if found and found.place not in entered and os.path.isdir(path):
            entered.add(found.place)
            yield from _walk(path, entered)
        else:
            yield path, found
