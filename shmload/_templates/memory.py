"""The memory that branches may take: how much each has for itself, and which have to go."""

import contextlib
import os
from collections.abc import Sequence

from shmload._templates.rights import cgroup_folders

MAX_BRANCHES = 4
# What programs find free in any case.
_RESERVE_NBYTES = 512 << 20
# What a branch takes until it has loaded; it was up to 120 MiB.
ROOM_NBYTES = 256 << 20
# All tasks stood still for want of memory, in percent of the last ten seconds. Some wait also where
# gigabytes are available and fresh pages come slowly.
_MAX_STALL = 10.0


def private_nbytes(pid: int) -> int:
    """Return the memory that a process has for itself alone, in bytes; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    except (OSError, ValueError):
        return 0


def available_nbytes() -> int:
    """Return the memory that processes like this one can still have, in bytes; 0 if it is short."""
    if _stalls() > _MAX_STALL:
        return 0
    found = []
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        found += [int(each.split()[1]) << 10 for each in lines if each.startswith("MemAvailable:")]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="latin-1") as file:
        for folder in cgroup_folders(file.read()).values():
            found += _rooms_of(folder)
    return max(0, min(found, default=1 << 62))


def branches_to_end(private: Sequence[int], available: int) -> int:
    """Return how many branches have to end, the least recently used first.

    Args:
        private: the memory of each that it has for itself, least recently used first.
        available: what is available to others, in bytes.
    """
    ends = max(0, len(private) - MAX_BRANCHES)
    while ends < len(private) and available + sum(private[:ends]) < _RESERVE_NBYTES:
        ends += 1
    return ends


def has_room(available: int) -> bool:
    """Tell whether there is memory for one more branch."""
    return available >= _RESERVE_NBYTES + ROOM_NBYTES


def _rooms_of(folder: str) -> list[int]:
    """Return what a control group, and those above it, have left (version 2)."""
    found = []
    while os.path.exists(f"{folder}/cgroup.procs"):
        with contextlib.suppress(OSError, ValueError):
            with open(f"{folder}/memory.max", encoding="ascii") as file:
                limit = int(file.read())  # a group without a limit has a word there
            with open(f"{folder}/memory.stat", encoding="ascii") as lines:
                cached = [
                    int(each.split()[1]) for each in lines if each.startswith("inactive_file")
                ]
            with open(f"{folder}/memory.current", encoding="ascii") as file:
                found.append(limit - int(file.read()) + sum(cached))
        folder = os.path.dirname(folder)
    return found


def _stalls() -> float:
    """Return how much of the last ten seconds all tasks have waited for memory, in percent."""
    try:
        with open("/proc/pressure/memory", encoding="ascii") as lines:
            full = next(line for line in lines if line.startswith("full"))
            return float(full.split("avg10=")[1].split()[0])
    except (OSError, ValueError, IndexError, StopIteration):  # this kernel does not count that
        return 0.0
