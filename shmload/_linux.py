"""Every raw system call: shared memory names, locks, memory limits, mappings.

Each function is one question to the kernel; errno becomes one of our errors here and nowhere else.
"""

import contextlib
import errno
import fcntl
import os
import resource
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import posix_ipc

from shmload._errors import (
    SegmentUntrusted,
    ShardMissing,
    ShardUnreadable,
    SharedMemoryFull,
    ShmloadError,
)

SHM_DIR = Path("/dev/shm")
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")

# Network and user-space file systems: a page fault there is a round trip, so a mapping crawls.
_REMOTE_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "afs",
)

_LOCK_POLL_S = 0.02


class Inode(NamedTuple):
    """What names a file for as long as it exists."""

    device: int
    number: int


class FileSystem(NamedTuple):
    """A mounted file system."""

    kind: str
    """Its type, such as `ext4`."""
    options: tuple[str, ...]
    """Of the file system, such as `huge=always`; not those of one mount of it."""

    @property
    def is_remote(self) -> bool:
        """Whether it is a network or user-space file system."""
        return self.kind.startswith(_REMOTE_FILE_SYSTEMS)


class Mapping(NamedTuple):
    """One line of /proc/self/maps; addresses in bytes."""

    start: int
    end: int
    offset: int
    """Where in the file it starts, in bytes."""
    inode: Inode


# Shared memory names ------------------------------------------------------------------------------


def shm_open(name: str, *, create: bool = False, writable: bool = False) -> int | None:
    """Open a POSIX shared memory object and return a close-on-exec descriptor, the caller's.

    The object must be a plain file of this user that nobody else may open: a name in a directory
    that all can write to proves nothing by itself.

    Returns:
        The descriptor, or None if there is no such object and `create` is false.

    Raises:
        SegmentUntrusted: the name is a link, or belongs to or is open to somebody else.
    """
    flags = os.O_NONBLOCK | (os.O_CREAT if create else 0)  # a planted FIFO must not block
    try:
        opened = posix_ipc.SharedMemory(f"/{name}", flags, 0o600, 0, not (create or writable))
    except posix_ipc.ExistentialError:
        return None
    except posix_ipc.PermissionsError as exc:
        raise SegmentUntrusted(name, "it belongs to another user") from exc
    except ValueError as exc:  # posix_ipc's answer to EISDIR
        raise SegmentUntrusted(name, "it is not a regular file") from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise SegmentUntrusted(name, "it is a symbolic link") from exc
        if exc.errno == errno.ENOSPC:
            raise no_inodes() from exc
        # posix_ipc has sentences of its own where there are too many open files.
        raise ShmloadError(f"/dev/shm/{name} cannot be opened: {exc.strerror or exc}") from exc
    found = os.fstat(opened.fd)
    reason = None
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}"
    elif not stat.S_ISREG(found.st_mode):
        reason = "it is not a regular file"
    elif create and stat.S_IMODE(found.st_mode) == 0:
        os.fchmod(opened.fd, 0o600)  # a umask of 0777 took every bit
    elif found.st_mode & 0o077:
        reason = f"its mode {stat.S_IMODE(found.st_mode):04o} lets others in"
    if reason:
        os.close(opened.fd)
        raise SegmentUntrusted(name, reason)
    return int(opened.fd)


def no_inodes() -> SharedMemoryFull:
    """Return the error for a /dev/shm in which not even an empty file can be made."""
    remedy = "remove files there, or `mount -o remount,nr_inodes=100k /dev/shm`"
    return SharedMemoryFull(1, 0, "/dev/shm", remedy, unit="inodes")


def write_at(fd: int, content: bytes, offset: int) -> None:
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


def unwritten_nbytes(prefix: str, suffix: str) -> int:
    """Return how many bytes the objects with such names will still take, by their length."""
    total = 0
    for name in os.listdir(SHM_DIR):
        if name.startswith(prefix) and name.endswith(suffix):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(SHM_DIR / name, follow_symlinks=False)
                total += max(0, found.st_size - 512 * found.st_blocks)  # stat(2): units of 512
    return total


def shm_unlink(name: str) -> None:
    """Remove a name; what is attached stays valid. A name that is gone already is fine."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(f"/{name}")


def shm_rename(old: str, new: str) -> None:
    """Give an object its final name, in one step."""
    (SHM_DIR / old).rename(SHM_DIR / new)


def is_named(fd: int, name: str) -> bool:
    """Tell whether `name` still leads to the object that `fd` holds open."""
    try:
        found = os.stat(SHM_DIR / name, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return inode_of(found) == inode_of(os.fstat(fd))


def inode_of(found: os.stat_result) -> Inode:
    """Return what names the file for as long as it exists."""
    return Inode(found.st_dev, found.st_ino)


# Locks --------------------------------------------------------------------------------------------


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take or change the lock of an open file; the kernel drops it with the last descriptor.

    flock and not fcntl's locks: those vanish when *any* descriptor of the file is closed.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give up the lock of an open file."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def lock_holders() -> dict[Inode, set[int]]:
    """Return which processes have taken flock locks, by file (proc_locks(5)).

    A process that inherited the lock's descriptor is not named, only the one that took it.
    """
    holders: dict[Inode, set[int]] = {}
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[1] == "FLOCK":  # waiters have an arrow and one field more
            major, minor, number = fields[5].split(":")
            inode = Inode(os.makedev(int(major, 16), int(minor, 16)), int(number))
            holders.setdefault(inode, set()).add(int(fields[4]))
    return holders


def wait_lock(fd: int, *, exclusive: bool, timeout_s: float) -> bool:
    """Take a lock within a deadline; returns whether it was taken.

    flock itself has no deadline, so this asks every 20 ms.
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
        raise ShardUnreadable(path, exc.strerror or str(exc), exc.errno or errno.EIO) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ShardUnreadable(path, "it is not a regular file")
    return fd


def file_system(device: int, mountinfo: Path = Path("/proc/self/mountinfo")) -> FileSystem | None:
    """Return the file system that a device number belongs to, or None where that is hidden."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), mountinfo.open() as mounts:
        for line in mounts:
            # proc_pid_mountinfo(5): ... (3) major:minor ... "-" (9) file system type, device,
            # (11) options of the file system
            if line.split(" ", 3)[2] == wanted:
                kind, *_, options = line.split(" - ", 1)[1].split()
                return FileSystem(kind, tuple(options.split(",")))
    return None


def is_remote(device: int) -> bool:
    """Tell whether a device number belongs to a network or user-space file system."""
    found = file_system(device)
    return found is not None and found.is_remote


def is_cached(fd: int, nbytes: int) -> bool:
    """Tell whether a file seems to lie in the page cache: samples eight places, reads no disk."""
    for place in range(8):
        try:
            os.preadv(fd, [bytearray(1)], nbytes * place // 8, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system that cannot tell, such as tmpfs: nothing to gain
    return True


def read_ahead(fd: int) -> None:
    """Ask the kernel to read a whole file into the page cache; returns at once."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


# Memory -------------------------------------------------------------------------------------------


def shm_free_nbytes() -> int:
    """Return how many bytes the file system at /dev/shm can still take."""
    found = os.statvfs(SHM_DIR)
    return found.f_bavail * found.f_frsize


def shm_total_nbytes() -> int:
    """Return the size of the file system at /dev/shm, in bytes."""
    found = os.statvfs(SHM_DIR)
    return found.f_blocks * found.f_frsize


def machine_free_nbytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the kernel's estimate of memory to be had without swapping, in bytes."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ShmloadError(f"{meminfo} has no MemAvailable; shmload needs Linux 3.14 or later")


def cgroup_free_nbytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return what the memory control groups of this process leave, in bytes; None for no limit.

    Both versions are read, and all ancestors. Page cache counts as free: the kernel drops it first.
    """
    free: list[int] = []
    for group, names in _memory_groups(root, membership):
        try:
            limit = (group / names[0]).read_text().strip()
            used = int((group / names[1]).read_text())
            entries = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for key, value in entries if key in names[2])
        except (OSError, ValueError):
            continue
        # Version 1 writes "no limit" as the largest page-aligned 63-bit number.
        if limit != "max" and int(limit) < 1 << 62:
            free.append(max(0, int(limit) - used + cached))
    return min(free, default=None)


def cgroup_limit_nbytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the least limit of this process's memory control groups, in bytes; None for none."""
    limits = []
    for group, names in _memory_groups(root, membership):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limits.append(int((group / names[0]).read_text()))
    return min((limit for limit in limits if limit < 1 << 62), default=None)


def _memory_groups(
    root: Path, membership: Path
) -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Yield the control groups that charge this process, with their files' names."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base = root
            names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            base = root / "memory"
            stat_names = ("total_inactive_file", "total_active_file")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", stat_names)
        else:
            continue
        group = base / inside.lstrip("/")
        while True:
            yield group, names
            if group == base:
                break
            group = group.parent


def huge_page_policy(
    path: Path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
) -> str | None:
    """Return what the kernel does for huge pages in shared memory; None if it knows of none."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return None


# The process and its kernel -----------------------------------------------------------------------


def resource_limits(kind: int) -> tuple[int, int]:
    """Return the soft and the hard limit of one of the kinds in `resource`; -1 for none."""
    return resource.getrlimit(kind)


def kernel_release() -> str:
    """Return the kernel's version, such as `6.8.0-45-generic`."""
    return os.uname().release


def has_pidfds() -> bool:
    """Tell whether processes can be watched by descriptor; a sandbox may forbid it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


# This process's mappings --------------------------------------------------------------------------


def mappings(inodes: set[Inode]) -> list[Mapping]:
    """Return this process's mappings of the given files."""
    found = []
    wanted = {(f"{os.major(i.device):02x}:{os.minor(i.device):02x}", i.number): i for i in inodes}
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, offset, device, number, *_ = line.split(None, 5)
            inode = wanted.get((device, int(number)))
            if inode:
                start, _, end = addresses.partition("-")
                found.append(Mapping(int(start, 16), int(end, 16), int(offset, 16), inode))
    return found


def is_touched(start: int, end: int) -> bool:
    """Tell whether this process may have read or written a page that lies wholly in a range.

    A page that was never touched has no entry in the page table (proc_pid_pagemap(5)): its 64 bits
    there have neither "present" (63) nor "swapped" (62).

    Args:
        start: first address, in bytes.
        end: address behind the last byte.
    """
    import numpy as np  # the parent needs numpy in no other place

    first, last = -(-start // PAGE_NBYTES), end // PAGE_NBYTES
    if last <= first:
        return False
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * 8)
            entries = np.frombuffer(pagemap.read((last - first) * 8), np.uint64)
    except OSError:
        return True  # a sandbox that hides it
    return entries.size < last - first or bool((entries >> np.uint64(62)).any())
