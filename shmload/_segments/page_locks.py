"""Which pages of segments are pinned for devices, and by which processes.

A process maps them a second time for that, shared and read-only, and no longer than they are
pinned. So the kernel's lists of mappings tell, and nothing is left behind by a process that dies.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import SharedRange, cgroup_limit_nbytes, shared_ranges
from shmload._segments.names import name_prefix
from shmload._settings import settings


class PageLock(msgspec.Struct, frozen=True, kw_only=True):
    """What one process pins."""

    pid: int
    nbytes: int
    """Size of the pages, in bytes."""


class PageLocks(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of this user pin."""

    nbytes: int
    """Size of all pages together, in bytes: a page that several processes pin counts once."""
    processes: tuple[PageLock, ...]
    """The processes that pin some, by number."""


def page_locks(proc: Path = Path("/proc")) -> PageLocks:
    """Return what is pinned now. It takes 0.1 to 1 ms for each process of this user.

    A load that copies from registered segments counts with the whole of each, while it copies.
    """
    found = shared_ranges(name_prefix(), proc)
    return PageLocks(
        nbytes=_covered(each for ranges in found.values() for each in ranges),
        processes=tuple(
            PageLock(pid=pid, nbytes=_covered(ranges)) for pid, ranges in sorted(found.items())
        ),
    )


def page_lock_limit() -> int:
    """Return how many bytes of waiting weights a process may keep pinned.

    By default half of the memory that the machine has, or this process's control groups.
    """
    chosen = settings().page_locked
    if chosen is not None:
        return chosen
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    return min(machine, cgroup_limit_nbytes() or machine) // 2


def _covered(ranges: Iterable[SharedRange]) -> int:
    """Return how many bytes some ranges cover; bytes in several of them count once."""
    covered = 0
    inode, reach = None, 0
    for each in sorted(ranges):
        if each.inode != inode:
            inode, reach = each.inode, 0
        covered += max(0, each.end - max(each.begin, reach))
        reach = max(reach, each.end)
    return covered
