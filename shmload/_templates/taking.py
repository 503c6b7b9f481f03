"""Takes over how a caller stands: limits, priorities, cores, signals, control group.

The caller says what only it can know (`standing`); the rest is read here of the kernel.
"""

import faulthandler
import os
import resource
import signal
from typing import Any

from shmload._templates.messages import Standing
from shmload._templates.rights import cgroup_folders

# What the kernel lets a process write about itself, and another one read.
_FILES = ("oom_score_adj", "coredump_filter")


class CannotTake(Exception):
    """The program cannot be given its caller's standing; str says which part."""


def take_standing(caller: int, said: Standing) -> None:
    """Give this process the standing of another; all but signals.

    Args:
        caller: its process id; the calling code makes sure that it is still that process.
        said: what it says itself.

    Raises:
        CannotTake: the kernel refuses a part.
    """
    part = ""
    try:
        part = "control group"
        _take_cgroup(_read(caller, "cgroup") or "")
        part = "cores"
        if os.sched_getaffinity(0) != (cores := os.sched_getaffinity(caller)):
            os.sched_setaffinity(0, cores)
        part = "scheduling"
        if _scheduling_of(0) != (wanted := _scheduling_of(caller)):
            policy, priority = wanted
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        part = "niceness"
        if os.getpriority(os.PRIO_PROCESS, 0) != (nice := os.getpriority(os.PRIO_PROCESS, caller)):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        for part in _FILES:
            _take_file(part, _read(caller, part))
        part = "timerslack_ns"
        _take_file(part, said.timer_slack or None)
        part = "limits"
        _take_limits(caller)
    except (OSError, ValueError) as exc:
        raise CannotTake(f"the caller's {part} cannot be taken over: {exc}") from exc
    os.umask(said.umask)


def take_dispositions(ignored: int) -> None:
    """Ignore these signals, a bit each, and give all others what a new Python gives them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = ignored >> (number - 1) & 1
        handler: Any = signal.SIG_IGN if is_ignored else signal.SIG_DFL
        if number == signal.SIGINT and not is_ignored:
            handler = signal.default_int_handler
        try:
            signal.signal(number, handler)
        except (OSError, ValueError):  # signals that the C library keeps
            continue
    if faulthandler.is_enabled():  # its handlers have just been replaced
        faulthandler.disable()
        faulthandler.enable()


def take_mask(blocked: int) -> None:
    """Block these signals, a bit each, and no others."""
    wanted = {number for number in signal.valid_signals() if blocked >> (number - 1) & 1}
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted)


def _scheduling_of(pid: int) -> tuple[int, int]:
    return os.sched_getscheduler(pid), os.sched_getparam(pid).sched_priority


def _take_limits(caller: int) -> None:
    kinds = {getattr(resource, name) for name in vars(resource) if name.startswith("RLIMIT_")}
    for kind in kinds:
        wanted, own = resource.prlimit(caller, kind), resource.getrlimit(kind)
        if kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA) and wanted[0] != -1:
            raise ValueError("a copy of a template has more memory than a new Python")
        if kind == resource.RLIMIT_STACK and wanted != own:
            raise ValueError("the room for stacks is chosen when a process starts")
        if wanted != own:
            resource.setrlimit(kind, wanted)


def _take_cgroup(wanted: str) -> None:
    """Enter the control groups that /proc/PID/cgroup of another process lists."""
    own = _read("self", "cgroup") or ""
    if own == wanted:
        return
    for line, folder in cgroup_folders(wanted).items():
        if line not in own.splitlines():
            with open(f"{folder}/cgroup.procs", "w", encoding="latin-1") as file:
                file.write("0")


def _take_file(name: str, value: str | None) -> None:
    if value is not None and _read("self", name) != value:
        with open(f"/proc/self/{name}", "w", encoding="latin-1") as file:
            file.write(value)


def _read(pid: int | str, name: str) -> str | None:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return None
