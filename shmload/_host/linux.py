"""System calls: shared memory names, locks, source files, room, process limits.

Each function does one thing; errno becomes one of our errors here and nowhere else.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import signal
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import posix_ipc

from shmload._host.changes import add_row
from shmload._host.limits import too_many_files
from shmload.errors import (
    SegmentRemoved,
    SegmentUntrusted,
    ShardMissing,
    ShardUnreadable,
    SharedMemoryFull,
    SharedMemoryUnusable,
    ShmloadError,
)

SHM_DIR = Path("/dev/shm")
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")

_LOCK_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
# Its number where glibc is found most; linux/ioprio.h.
_SYS_IOPRIO_SET = {"aarch64": 30, "x86_64": 251}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13
# What the module mmap lacks, see mmap(2).
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
# linux/mman.h, since Linux 5.14
_MADV_POPULATE_READ = 22


class Inode(NamedTuple):
    """Identifies a file for as long as it exists."""

    device: int
    number: int


# Shared memory names ------------------------------------------------------------------------------


def shm_open(name: str, *, create: bool = False, writable: bool = False) -> int | None:
    """Open a POSIX shared memory object and return a close-on-exec descriptor, the caller's.

    The object must be a plain file of this user that no other user may open: every user can create
    names in /dev/shm, so a name alone proves nothing.

    Returns:
        The descriptor, or None if there is no such object and `create` is false.

    Raises:
        SegmentUntrusted: the name is a link, belongs to another user, or is open to others.
        SharedMemoryUnusable: nothing can be opened or made in /dev/shm.
    """
    flags = os.O_NONBLOCK | (os.O_CREAT if create else 0)  # a planted FIFO must not block
    try:
        opened = posix_ipc.SharedMemory(f"/{name}", flags, 0o600, 0, not (create or writable))
    except posix_ipc.ExistentialError:
        if create:
            raise SharedMemoryUnusable(errno.ENOENT) from None
        return None
    except posix_ipc.PermissionsError as exc:
        if create and not os.path.lexists(SHM_DIR / name):
            raise SharedMemoryUnusable(errno.EACCES) from None
        raise SegmentUntrusted(name, _why_forbidden(name, exc)) from exc
    except ValueError as exc:  # posix_ipc's answer to EISDIR
        raise SegmentUntrusted(name, "it is not a regular file") from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise SegmentUntrusted(name, "it is a symbolic link") from exc
        if exc.errno == errno.ENOSPC:
            raise no_inodes() from exc
        if exc.errno == errno.EMFILE or (not exc.errno and "number of files" in str(exc)):
            raise too_many_files(SHM_DIR / name) from exc
        if exc.errno in (errno.EROFS, errno.ENOTDIR):
            raise SharedMemoryUnusable(exc.errno) from None
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
        raise SegmentUntrusted(name, reason)
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
        SharedMemoryUnusable: it cannot be listed.
    """
    try:
        return os.listdir(SHM_DIR)
    except OSError as exc:
        raise SharedMemoryUnusable(exc.errno) from None


def no_inodes() -> SharedMemoryFull:
    """Return the error for a /dev/shm that is out of inodes: not even an empty file can be made."""
    remedy = "remove files there, or `mount -o remount,nr_inodes=100k /dev/shm`"
    return SharedMemoryFull(1, 0, "/dev/shm", remedy, unit="inodes")


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
            raise SharedMemoryFull(len(content), 0, "/dev/shm", remedy) from exc


def written_nbytes(names: Iterable[str]) -> int:
    """Return how much memory these objects have, in bytes; missing objects count as 0."""
    return sum(512 * found.st_blocks for found in _stats(names))  # stat(2): units of 512


def unwritten_nbytes(names: Iterable[str]) -> int:
    """Return how many bytes of these objects have no memory yet; missing objects count as 0."""
    return sum(max(0, found.st_size - 512 * found.st_blocks) for found in _stats(names))


def _stats(names: Iterable[str]) -> Iterator[os.stat_result]:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            yield os.stat(SHM_DIR / name, follow_symlinks=False)


def shm_nbytes(name: str) -> int:
    """Return the length of an object in bytes; 0 if there is none.

    Raises:
        SharedMemoryUnusable: nobody can tell.
    """
    try:
        return os.stat(SHM_DIR / name, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
    except OSError as exc:
        raise SharedMemoryUnusable(exc.errno) from None


def shm_unlink(name: str) -> None:
    """Remove a name, if it exists. What is mapped or open stays valid."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(f"/{name}")


def shm_rename(old: str, new: str) -> None:
    """Rename an object in one step, replacing what has the new name.

    Raises:
        SegmentRemoved: there is no object of the old name.
        SegmentUntrusted: another user has taken the new one.
    """
    try:
        (SHM_DIR / old).rename(SHM_DIR / new)
    except FileNotFoundError as exc:
        raise SegmentRemoved(old) from exc
    except PermissionError as exc:  # /dev/shm is sticky
        raise SegmentUntrusted(new, "it belongs to another user") from exc
    except IsADirectoryError as exc:
        raise SegmentUntrusted(new, "it is not a regular file") from exc


def is_named(fd: int, name: str) -> bool:
    """Tell whether `name` still leads to the object that `fd` holds open."""
    try:
        found = os.stat(SHM_DIR / name, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return inode_of(found) == inode_of(os.fstat(fd))


def inode_of(found: os.stat_result) -> Inode:
    """Return the inode of a file from its stat."""
    return Inode(found.st_dev, found.st_ino)


# Locks --------------------------------------------------------------------------------------------


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take or change the lock of an open file; return whether it was taken; never waits.

    The kernel drops it with the last descriptor of the open file. flock, not fcntl's locks: those
    vanish when *any* descriptor of the file is closed. A forked child shares the lock, unless it is
    exclusive and another thread than the forking one took it.
    """
    if exclusive:
        _lockers[fd] = threading.get_ident()
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        _lockers.pop(fd, None)
        return False
    except BaseException:  # a file system without locks
        _lockers.pop(fd, None)
        raise
    if not exclusive:
        _lockers.pop(fd, None)
    return True


def close(fd: int) -> None:
    """Close a descriptor; give up its lock first if it is exclusive.

    A child that was forked before the lock was taken has the same open file, and would keep it.
    """
    try:
        if fd in _lockers:
            unlock(fd)
    finally:
        _lockers.pop(fd, None)
        os.close(fd)


def close_sharing_lock(fd: int) -> None:
    """Close a descriptor; its exclusive lock stays with the others of the open file, if any."""
    _lockers.pop(fd, None)
    os.close(fd)


# By descriptor: the thread that has an exclusive lock with it.
_lockers: dict[int, int] = {}


def _exclusive_locks() -> list[int]:
    """Return the descriptors with which other threads hold an exclusive lock."""
    here = threading.get_ident()
    return [fd for fd, locker in tuple(_lockers.items()) if locker != here and _is_exclusive(fd)]


def _is_exclusive(fd: int) -> bool:
    try:
        with open(f"/proc/self/fdinfo/{fd}") as lines:
            return any("FLOCK" in line and "WRITE" in line for line in lines)
    except OSError:  # it is closed
        return False


def _leave_exclusive_locks() -> None:
    """Leave to the parent of a forked child the locks that its other threads hold.

    Else what a load was about to unlock by closing a file stays locked as long as the child lives.
    """
    if locks := _exclusive_locks():
        # The numbers stay in use: nothing may get them that an object of these threads may close.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in locks:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
    # What the forking thread holds is shared: closed here, it stays the parent's.
    _lockers.clear()


add_row("exclusive locks of files", _exclusive_locks, _leave_exclusive_locks)


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
    return _reopen(fd, os.O_WRONLY)


def reopen_to_map(fd: int) -> int:
    """As `reopen_to_write`, for reading and writing: a mapping of it can be made writable."""
    return _reopen(fd, os.O_RDWR)


def _reopen(fd: int, access: int) -> int:
    mode = stat.S_IMODE(os.fstat(fd).st_mode) & ~0o222
    os.fchmod(fd, mode | stat.S_IWUSR)
    try:
        return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)
    finally:
        os.fchmod(fd, mode)


def unlock(fd: int) -> None:
    """Give up the lock of an open file."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    _lockers.pop(fd, None)


def wait_lock(fd: int, *, exclusive: bool, timeout_s: float) -> bool:
    """Take a lock within a deadline, in seconds; return whether it was taken.

    flock has no deadline, so this tries every 20 ms.
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOCK_POLL_S)
    return True


# Source files -------------------------------------------------------------------------------------


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


# Room ---------------------------------------------------------------------------------------------


def shm_free_nbytes() -> int:
    """Return how many bytes are free in the file system at /dev/shm.

    Raises:
        SharedMemoryUnusable: there is none.
    """
    found = _shm_statistics()
    return found.f_bavail * found.f_frsize


def shm_total_nbytes() -> int:
    """Return the size of the file system at /dev/shm, in bytes.

    Raises:
        SharedMemoryUnusable: there is none.
    """
    found = _shm_statistics()
    return found.f_blocks * found.f_frsize


def _shm_statistics() -> os.statvfs_result:
    try:
        return os.statvfs(SHM_DIR)
    except OSError as exc:
        raise SharedMemoryUnusable(exc.errno) from None


# Names -------------------------------------------------------------------------------------------


def reserve_at(start: int, end: int) -> None:
    """Replace what is mapped at some addresses by memory that cannot be read; it takes no room.

    Args:
        start: the first address, on a page.
        end: the address after the last.

    Raises:
        OSError: the kernel refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    _mmap(start, end - start, _PROT_NONE, flags, -1, 0)


def map_at(start: int, end: int, fd: int, offset: int) -> None:
    """Map a file copy-on-write at addresses that are reserved.

    Args:
        start: the first address, on a page.
        end: the address after the last.
        fd: the file; stays the caller's.
        offset: where it begins in the file, in bytes.

    Raises:
        OSError: the kernel refuses.
    """
    _mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset)


def populate(start: int, nbytes: int) -> bool:
    """Bring the pages of mapped memory into this process's page table, all at once.

    To read them one after the other makes a fault for each few. Memory that cannot be read is left
    alone: to touch it fails as it would have.

    Args:
        start: address of the first byte.
        nbytes: how many bytes.

    Returns:
        Whether the kernel did; it can since Linux 5.14.
    """
    first = start // PAGE_NBYTES * PAGE_NBYTES
    return _call("madvise", *_memory(first, start + nbytes - first), _MADV_POPULATE_READ) == 0


def protect(start: int, nbytes: int, *, writable: bool) -> None:
    """Make mapped memory writable, or read-only.

    Args:
        start: address of the first byte, on a page.
        nbytes: how many bytes; the rest of the last page changes too.
        writable: only of a private mapping, or of one that was made from a writable descriptor.

    Raises:
        OSError: the kernel refuses.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if code := _call("mprotect", *_memory(start, nbytes), protection):
        raise OSError(code, os.strerror(code))


def _mmap(start: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> None:
    """Call mmap(2) with MAP_FIXED, which Python's mmap cannot."""
    call = _c_library().mmap
    call.restype = ctypes.c_void_p
    where, length = _memory(start, nbytes)
    if call(where, length, protection, flags | _MAP_FIXED, fd, ctypes.c_long(offset)) != start:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _memory(start: int, nbytes: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(start), ctypes.c_size_t(nbytes)


def _call(name: str, *arguments: Any) -> int:
    """Call a function of the C library; returns its errno, or 0."""
    return ctypes.get_errno() if getattr(_c_library(), name)(*arguments) else 0


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def exchange_names(one: str, other: str) -> bool:
    """Exchange two names of one file system in one step; return False if it cannot do that.

    Raises:
        OSError: one of them is not there, or may not be renamed.
    """
    # fcntl.h, linux/fs.h
    at_fdcwd, rename_exchange = -100, 2
    try:
        code = _call(
            "renameat2", at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange
        )
    except AttributeError:  # a C library without it
        return False
    if code in (0, errno.EINVAL, errno.ENOSYS):
        return code == 0
    raise OSError(code, os.strerror(code), one, None, other)


# The process and its kernel -----------------------------------------------------------------------


def die_with_parent() -> None:
    """Tell the kernel to kill this process when the thread that forked it ends.

    Raises:
        OSError: the kernel refuses; not known to happen.
    """
    # linux/prctl.h
    if code := _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(code, "prctl(PR_SET_PDEATHSIG)")


def give_way() -> None:
    """Let everything else on the machine go first; be the first to end where memory lacks.

    This process gets a session of its own, since all of a session is scheduled with one weight.
    What the kernel refuses stays as it is.
    """
    with contextlib.suppress(OSError):  # it leads one
        os.setsid()
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Where each session is scheduled as a group, only the group's weight counts (sched(7)).
    files = {"oom_score_adj": "1000"}
    if os.getsid(0) == os.getpid():
        files["autogroup"] = "19"
    for file, value in files.items():
        with contextlib.suppress(OSError), open(f"/proc/self/{file}", "w") as setting:
            setting.write(value)
    with contextlib.suppress(KeyError):
        number = _SYS_IOPRIO_SET[os.uname().machine]
        _call("syscall", number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


def has_pidfds() -> bool:
    """Tell whether pidfds can be opened; a sandbox may forbid it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
