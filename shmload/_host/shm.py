"""The objects in /dev/shm: their names, their lengths, and the room for them.

Every user can make names there, so a name alone proves nothing. What the kernel answers becomes one
of our errors here and nowhere else.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import posix_ipc

from shmload._host.descriptors import inode_of
from shmload._host.limits import too_many_files
from shmload._wording import format_nbytes
from shmload.errors import (
    SegmentError,
    SegmentUntrusted,
    SharedMemoryFull,
    ShmloadError,
)

SHM_DIR = Path("/dev/shm")


def shm_open(name: str, *, create: bool = False, writable: bool = False) -> int | None:
    """Open a POSIX shared memory object and return a close-on-exec descriptor, the caller's.

    The object must be a plain file of this user that no other user may open: every user can create
    names in /dev/shm, so a name alone proves nothing.

    Returns:
        The descriptor, or None if there is no such object and `create` is false.

    Raises:
        SegmentUntrusted: the name is a link, belongs to another user, or is open to others.
        SegmentError: nothing can be opened or made in /dev/shm.
    """
    flags = os.O_NONBLOCK | (os.O_CREAT if create else 0)  # a planted FIFO must not block
    try:
        opened = posix_ipc.SharedMemory(f"/{name}", flags, 0o600, 0, not (create or writable))
    except posix_ipc.ExistentialError:
        if create:
            raise _unusable(errno.ENOENT) from None
        return None
    except posix_ipc.PermissionsError as exc:
        if create and not os.path.lexists(SHM_DIR / name):
            raise _unusable(errno.EACCES) from None
        raise _untrusted(name, _why_forbidden(name, exc)) from exc
    except ValueError as exc:  # posix_ipc's answer to EISDIR
        raise _untrusted(name, "it is not a regular file") from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _untrusted(name, "it is a symbolic link") from exc
        if exc.errno == errno.ENOSPC:
            raise no_inodes() from exc
        if exc.errno == errno.EMFILE or (not exc.errno and "number of files" in str(exc)):
            raise too_many_files(SHM_DIR / name) from exc
        if exc.errno in (errno.EROFS, errno.ENOTDIR):
            raise _unusable(exc.errno) from None
        raise ShmloadError(f"/dev/shm/{name} cannot be opened: {exc.strerror or exc}") from exc
    found = os.fstat(opened.fd)
    reason = None
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}"
    elif not stat.S_ISREG(found.st_mode):
        reason = "it is not a regular file"
    elif create and stat.S_IMODE(found.st_mode) == 0:
        os.fchmod(opened.fd, 0o600)  # a umask of 0777 has cleared every bit
    elif found.st_mode & 0o077:
        reason = f"its mode {stat.S_IMODE(found.st_mode):04o} lets others in"
    if reason:
        os.close(opened.fd)
        raise _untrusted(name, reason)
    return int(opened.fd)


def _why_forbidden(name: str, error: Exception) -> str:
    with contextlib.suppress(OSError):
        owner = os.lstat(SHM_DIR / name).st_uid
        if owner != os.geteuid():
            return f"it belongs to user {owner}"
    return f"it cannot be opened: {error}"


def shm_names() -> list[str]:
    """Return the names of everything in /dev/shm.

    Raises:
        SegmentError: it cannot be listed.
    """
    try:
        return os.listdir(SHM_DIR)
    except OSError as exc:
        raise _unusable(exc.errno) from None


def no_inodes() -> SharedMemoryFull:
    """Return the error for a /dev/shm that is out of inodes: not even an empty file can be made."""
    return SharedMemoryFull(
        "1 inode needed in shared memory but /dev/shm leaves 0; remove files there, or `mount -o "
        "remount,nr_inodes=100k /dev/shm`",
        limit="/dev/shm",
        errno=errno.ENOSPC,
    )


def no_room(nbytes: int, available: int | None, limit: str, remedy: str) -> SharedMemoryFull:
    """Return the error for so many bytes that do not fit; its arguments are the error's."""
    return SharedMemoryFull(
        lack_of_room(nbytes, available, limit, remedy),
        needed=nbytes,
        available=available,
        limit=limit,
        errno=errno.ENOSPC,
    )


def lack_of_room(nbytes: int, available: int | None, limit: str, remedy: str) -> str:
    """Say that so many bytes do not fit."""
    left = f", of {limit}"
    if available is not None:
        left = f" but {limit} leaves {format_nbytes(available)}"
    return f"{format_nbytes(nbytes)} needed in shared memory{left}; {remedy}"


def removed(name: str) -> SegmentError:
    """Return the error for a name that was removed while its segment was decoded."""
    return SegmentError(
        f"/dev/shm/{name} was removed while it was being decoded; load again. If no one ran `rm`, "
        "systemd did (RemoveIPC= in logind.conf) when the user's last session ended: `loginctl "
        "enable-linger` prevents it",
        name=name,
    )


def _untrusted(name: str, reason: str) -> SegmentUntrusted:
    return SegmentUntrusted(
        f"/dev/shm/{name} is not trusted: {reason}; ask its owner to remove it", name=name
    )


def _unusable(number: int | None) -> SegmentError:
    return SegmentError(
        f"/dev/shm cannot be used: {os.strerror(number or errno.EIO)}; mount a file system of "
        "memory there that every user may write: `mount -t tmpfs -o mode=1777 tmpfs /dev/shm`",
        errno=number,
    )


def write_at(fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of some bytes into a shared memory object.

    Raises:
        SharedMemoryFull: there is no room for them.
    """
    done = 0
    while done < len(content):
        try:
            done += os.pwrite(fd, memoryview(content)[done:], offset + done)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            remedy = "free some with `shmload rm` and `shmload gc`, or enlarge it"
            raise no_room(len(content), 0, "/dev/shm", remedy) from exc


def unwritten_nbytes(names: Iterable[str]) -> int:
    """Return how many bytes of these objects have no memory yet; missing objects count as 0."""
    return sum(max(0, found.st_size - 512 * found.st_blocks) for found in _stats(names))


def _stats(names: Iterable[str]) -> Iterator[os.stat_result]:
    return filter(None, map(shm_stat, names))


def shm_stat(name: str) -> os.stat_result | None:
    """Return what the kernel says of an object; None if there is none.

    Raises:
        SegmentError: it says nothing.
    """
    try:
        return os.stat(SHM_DIR / name, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise _unusable(exc.errno) from None


def shm_nbytes(name: str) -> int:
    """Return the length of an object in bytes; 0 if there is none.

    Raises:
        SegmentError: as `shm_stat`.
    """
    found = shm_stat(name)
    return found.st_size if found else 0


def shm_unlink(name: str) -> None:
    """Remove a name, if it exists. What is mapped or open stays valid."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(f"/{name}")


def shm_rename(old: str, new: str) -> None:
    """Rename an object in one step, replacing what has the new name.

    Raises:
        SegmentError: there is no object of the old name.
        SegmentUntrusted: another user has taken the new one.
    """
    try:
        (SHM_DIR / old).rename(SHM_DIR / new)
    except FileNotFoundError as exc:
        raise removed(old) from exc
    except PermissionError as exc:  # /dev/shm is sticky
        raise _untrusted(new, "it belongs to another user") from exc
    except IsADirectoryError as exc:
        raise _untrusted(new, "it is not a regular file") from exc


def is_named(fd: int, name: str) -> bool:
    """Tell whether `name` still leads to the object that `fd` holds open."""
    found = shm_stat(name)
    return found is not None and inode_of(found) == inode_of(os.fstat(fd))


def reopen(fd: int) -> int:
    """Open a descriptor's file again, for reading; return a close-on-exec descriptor, the caller's.

    Unlike a duplicate it has locks of its own. The file need not have a name.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def reopen_to_write(fd: int) -> int:
    """Open a read-only file again, for writing; return a close-on-exec descriptor, the caller's.

    The file must be this user's, and no other process may change its mode meanwhile. Afterwards it
    is read-only, even if a process that was killed here has left it writable.
    """
    mode = stat.S_IMODE(os.fstat(fd).st_mode) & ~0o222
    os.fchmod(fd, mode | stat.S_IWUSR)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    finally:
        os.fchmod(fd, mode)


def shm_free_nbytes() -> int:
    """Return how many bytes are free in the file system at /dev/shm.

    Raises:
        SegmentError: there is none.
    """
    found = _shm_statistics()
    return found.f_bavail * found.f_frsize


def shm_total_nbytes() -> int:
    """Return the size of the file system at /dev/shm, in bytes.

    Raises:
        SegmentError: there is none.
    """
    found = _shm_statistics()
    return found.f_blocks * found.f_frsize


def _shm_statistics() -> os.statvfs_result:
    try:
        return os.statvfs(SHM_DIR)
    except OSError as exc:
        raise _unusable(exc.errno) from None
