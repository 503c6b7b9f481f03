"""What the kernel says in /proc and /sys: mounts, locks, memory and mappings.

Guarantee: every call reads again, since each answer can change at any time; nothing is written.
"""

import bisect
import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from shmload._host.descriptors import Inode
from shmload.errors import ShmloadError

# Network and user-space file systems: each page fault is a round trip, so mappings are slow.
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

# Processes that fork faster than this many looks at the list can follow do not end.
_MAX_LOOKS = 4


class Mapping(NamedTuple):
    """One line of /proc/self/maps; addresses in bytes."""

    start: int
    end: int
    offset: int
    """Where it starts in the file, in bytes."""
    inode: Inode
    permissions: str
    """As the kernel writes them: `rw-p` is private and writable."""
    path: str
    """The file's path, as the kernel writes it; empty if there is none."""


# File systems -------------------------------------------------------------------------------------


def file_system(device: int, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system of a device number, as `ext4`; empty if it is unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), mountinfo.open(encoding="latin-1") as mounts:
        for line in mounts:
            # proc_pid_mountinfo(5): ... (3) major:minor ... "-" (9) file system type
            if line.split(" ", 3)[2] == wanted:
                return line.split(" - ", 1)[1].split(" ", 1)[0]
    return ""


def is_remote(kind: str) -> bool:
    """Tell whether a type of file systems is of a network or user space."""
    return kind.startswith(_REMOTE_FILE_SYSTEMS)


# Locks --------------------------------------------------------------------------------------------


def lock_holders() -> dict[Inode, set[int]]:
    """Return the processes that have taken flock locks, by file (proc_locks(5)).

    The result lacks processes that inherited the descriptor of a lock, and processes that this one
    cannot see: in another pid namespace, or in a sandbox that hides the file.
    """
    holders: dict[Inode, set[int]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) == 8 and fields[1] == "FLOCK":  # a waiter has an arrow as an extra field
                major, minor, number = fields[5].split(":")
                inode = Inode(os.makedev(int(major, 16), int(minor, 16)), int(number))
                holders.setdefault(inode, set()).add(int(fields[4]))
    return holders


# Processes ----------------------------------------------------------------------------------------


def command_of(pid: int) -> tuple[str, ...]:
    """Return a process's command line (proc_pid_cmdline(5)); empty if it is gone or hidden."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ()
    return tuple(word.decode(errors="replace") for word in words if word)


# Memory -------------------------------------------------------------------------------------------


def machine_free_nbytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the kernel's estimate of memory that is available without swapping, in bytes."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ShmloadError(f"{meminfo} has no MemAvailable; shmload needs Linux 3.14 or later")


def rollup_nbytes(pid: int, kind: str, proc: Path = Path("/proc")) -> int:
    """Return a process's memory of some kind, in bytes; nothing if it has ended.

    Args:
        pid: its process id.
        kind: what the lines of smaps_rollup begin with that count: `Pss:` for its share,
            `Private_` for what it has for itself alone.
        proc: where the processes are.
    """
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024


def cgroup_free_nbytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return what this process's memory control groups leave free, in bytes; None for no limit.

    Reads both versions and all ancestors. Page cache counts as free: the kernel drops it first.
    """
    free = []
    for group, limit, usage, caches in _limited_groups(root, membership):
        with contextlib.suppress(OSError, ValueError):
            used = int((group / usage).read_text())
            entries = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for key, value in entries if key in caches)
            free.append(max(0, limit - used + cached))
    return min(free, default=None)


def cgroup_limit_nbytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the lowest limit of this process's memory control groups, in bytes; None for none."""
    return min((limit for _, limit, *_ in _limited_groups(root, membership)), default=None)


def _limited_groups(
    root: Path, membership: Path
) -> Iterator[tuple[Path, int, str, tuple[str, str]]]:
    """Yield the control groups that limit this process's memory.

    With the limit, the name of the file that has the usage, and those of page cache in its stat.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
            caches = ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            caches = ("total_inactive_file", "total_active_file")
        else:
            continue
        group = base / inside.lstrip("/")
        for each in (group, *group.parents[: len(group.parts) - len(base.parts)]):
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                limit = int((each / names[0]).read_text())
                # Version 1 writes "no limit" as the largest page-aligned 63-bit number.
                if limit < 1 << 62:
                    yield each, limit, names[1], caches


# Mappings -----------------------------------------------------------------------------------------


class Mappings(list[Mapping]):
    """Mappings in the order of their addresses."""

    def at(self, address: int) -> Mapping | None:
        """Return the one that an address lies in; None if none does."""
        position = bisect.bisect_right(self, address, key=lambda each: each.start) - 1
        found = self[position] if position >= 0 else None
        return found if found and address < found.end else None


def mappings_of(inodes: Collection[Inode]) -> Mappings:
    """Return this process's mappings of the given files."""
    found = _parse_maps(Path("/proc/self/maps").read_bytes(), _devices(inodes)) if inodes else ()
    return Mappings(sorted(each for each in found if each.inode in inodes))


def mappings_below(prefix: str) -> list[tuple[int, int]]:
    """Return the addresses of this process's mappings of shared memory, in bytes.

    Args:
        prefix: of the names; a file counts that has no name any more, or is a memfd.
    """
    found = _parse_maps(Path("/proc/self/maps").read_bytes(), _paths(prefix))
    return [(each.start, each.end) for each in found]


def mappers(inodes: Collection[Inode], proc: Path = Path("/proc")) -> dict[Inode, set[int]]:
    """Return the processes of this user that map the given files, by file.

    It reads the mappings of all of them, so it takes 0.1 to 1 ms for each process. The result lacks
    processes in another pid namespace, and processes that hide their mappings (PR_SET_DUMPABLE).
    """
    found: dict[Inode, set[int]] = {}
    seen: set[int] = set()
    # A process may end after it has forked: look again for those that are new.
    for _ in range(_MAX_LOOKS if inodes else 0):
        by_process = dict(_mappings_by_process(_devices(inodes), proc, seen))
        if not by_process:
            break
        seen |= by_process.keys()
        for pid, each in by_process.items():
            for inode in {mapping.inode for mapping in each}.intersection(inodes):
                found.setdefault(inode, set()).add(pid)
    return found


def _devices(inodes: Collection[Inode]) -> list[bytes]:
    """Return the devices of files, as maps writes them between other fields."""
    devices = {inode.device for inode in inodes}
    return [b" %02x:%02x " % (os.major(each), os.minor(each)) for each in devices]


def _paths(prefix: str) -> list[bytes]:
    """Return how maps begins the paths of shared memory whose names have a prefix."""
    return [b" /dev/shm/" + prefix.encode(), b" /memfd:" + prefix.encode()]


def _mappings_by_process(
    parts: Collection[bytes], proc: Path, seen: Collection[int] = ()
) -> Iterator[tuple[int, list[Mapping]]]:
    """Yield the mappings in lines with one of some parts, for each process that is not seen yet.

    Those of other users count as processes without any.
    """
    for pid in {int(name) for name in os.listdir(proc) if name.isdecimal()}.difference(seen):
        content = b""
        # It has ended, or may not be looked at. Any other error is raised, such as too many open
        # files: what the process uses might be removed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(proc / str(pid)).st_uid == os.geteuid():
                content = (proc / str(pid) / "maps").read_bytes()
        yield pid, _parse_maps(content, parts)


def _parse_maps(content: bytes, parts: Collection[bytes]) -> list[Mapping]:
    """Return the mappings in those lines of maps that have one of some parts."""
    if not any(part in content for part in parts):
        return []
    lines = (line for line in content.splitlines() if any(part in line for part in parts))
    found = []
    for line in lines:
        addresses, mode, offset, device, number, *path = line.split(None, 5)
        start, _, end = addresses.partition(b"-")
        major, _, minor = device.partition(b":")
        inode = Inode(os.makedev(int(major, 16), int(minor, 16)), int(number))
        name = os.fsdecode(path[0]) if path else ""
        found.append(
            Mapping(int(start, 16), int(end, 16), int(offset, 16), inode, mode.decode(), name)
        )
    return found
