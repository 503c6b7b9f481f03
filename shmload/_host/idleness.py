"""Whether the machine has nothing better to do: what work in the background asks first."""

import os
import time
from pathlib import Path
from typing import NamedTuple

from shmload._host.procfs import cgroup_free_nbytes, machine_free_nbytes, memory_stall
from shmload._wording import format_nbytes

# Above this share of the machine's cores, background work would take from what they share:
# memory's bandwidth, caches, the other thread of a core.
_MOST_BUSY = 0.4
# In percent of the last ten seconds, how long some task has waited for memory.
_MOST_STALLED = 5.0


class Load(NamedTuple):
    """What the machine did for some seconds."""

    cores: int
    busy_cores: float
    """How many cores worked, on average, other than for niced processes."""
    free_nbytes: int
    """Memory that this process may still take."""
    stalled: float = 0.0
    """In percent of the last ten seconds, how long some task has waited for memory."""


def why_wait(load: Load, nbytes: int) -> str:
    """Say why background work has to wait; empty if it need not.

    Args:
        load: of the machine.
        nbytes: the memory that the work takes.
    """
    if load.free_nbytes < nbytes:
        return f"only {format_nbytes(load.free_nbytes)} of memory are free"
    if load.stalled > _MOST_STALLED:
        return f"processes wait for memory ({load.stalled:.0f} % of the time)"
    if load.busy_cores > _MOST_BUSY * load.cores:
        return f"{load.busy_cores:.1f} of {load.cores} cores are busy"
    return ""


def observe(seconds: float) -> Load:
    """Look on for some seconds, in which this process sleeps."""
    busy, ticks = _ticks()
    time.sleep(seconds)
    busy_then, ticks_then = _ticks()
    cores = os.cpu_count() or 1
    share = (busy_then - busy) / max(1, ticks_then - ticks)
    return Load(cores, share * cores, free_nbytes(), memory_stall("some"))


def free_nbytes() -> int:
    """Return how much memory this process may still take, in bytes."""
    limit = cgroup_free_nbytes()
    free = machine_free_nbytes()
    return free if limit is None else min(free, limit)


def _ticks(stat: Path = Path("/proc/stat")) -> tuple[int, int]:
    """Return how long the cores have worked for others than niced processes, and all their time."""
    with stat.open() as file:
        user, nice, system, idle, waiting, *rest = map(int, file.readline().split()[1:9])
    busy = user + system + sum(rest)
    return busy, busy + nice + idle + waiting
