"""Work in the background: whether the machine is idle enough for it, and how it gives way."""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from shmload._host.memory import call
from shmload._host.procfs import cgroup_free_nbytes, machine_free_nbytes, memory_stall
from shmload._wording import format_nbytes

# Above this share of the machine's cores, background work would take from what they share:
# memory's bandwidth, caches, the other thread of a core.
_MOST_BUSY = 0.4
# In percent of the last ten seconds, how long some task has waited for memory.
_MOST_STALLED = 5.0
# Its number where glibc is found most; linux/ioprio.h.
_SYS_IOPRIO_SET = {"aarch64": 30, "x86_64": 251}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13


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
        call("syscall", number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
