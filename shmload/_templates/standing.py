"""How a process stands with the kernel: directory, limits, priorities, signals, control group.

A caller reads its own; the process that runs its program takes them over.
"""

import contextlib
import faulthandler
import os
import resource
import signal
from typing import Any

from shmload._templates.kind import read_status

_LIMITS = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))
# What the kernel lets a process write about itself.
_FILES = ("oom_score_adj", "timerslack_ns", "coredump_filter")


class CannotTake(Exception):
    """The program cannot be given its caller's standing; str says which part."""


def read_standing() -> dict[str, Any]:
    """Return this process's standing, as JSON can carry it."""
    status = read_status()
    return {
        "umask": int(status["Umask"], 8),
        "blocked": int(status["SigBlk"], 16),
        "ignored": int(status["SigIgn"], 16),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "policy": (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        "files": {name: _read(name) for name in _FILES},
        "cgroup": _read("cgroup"),
    }


def take_standing(wanted: dict[str, Any]) -> None:
    """Give this process the standing of another; all but the mask of signals.

    Raises:
        CannotTake: the kernel refuses a part.
    """
    own = read_standing()
    part = ""
    try:
        part = "control group"
        if own["cgroup"] != wanted["cgroup"]:
            _enter_cgroup(wanted["cgroup"])
        part = "cores"
        if own["cores"] != wanted["cores"]:
            os.sched_setaffinity(0, wanted["cores"])
        part = "scheduling"
        if own["policy"] != wanted["policy"]:
            policy, priority = wanted["policy"]
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        part = "niceness"
        if own["nice"] != wanted["nice"]:
            os.setpriority(os.PRIO_PROCESS, 0, wanted["nice"])
        for name, value in wanted["files"].items():
            part = name
            if own["files"][name] != value:
                _write(name, value)
        for name, (soft, hard) in wanted["limits"].items():
            part = name
            if tuple(own["limits"][name]) != (soft, hard):
                resource.setrlimit(getattr(resource, name), (soft, hard))
    except (OSError, ValueError) as exc:
        raise CannotTake(f"the caller's {part} cannot be taken over: {exc}") from exc
    os.umask(wanted["umask"])


def take_dispositions(ignored: int) -> None:
    """Ignore these signals, a bit each, and give all others what a new Python gives them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = ignored >> (number - 1) & 1
        handler: Any = signal.SIG_IGN if is_ignored else signal.SIG_DFL
        if number == signal.SIGINT and not is_ignored:
            handler = signal.default_int_handler
        with contextlib.suppress(OSError, ValueError):  # signals that the C library keeps
            signal.signal(number, handler)
    if faulthandler.is_enabled():  # its handlers have just been replaced
        faulthandler.disable()
        faulthandler.enable()


def take_mask(blocked: int) -> None:
    """Block these signals, a bit each, and no others."""
    wanted = {number for number in signal.valid_signals() if blocked >> (number - 1) & 1}
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted)


def _read(name: str) -> str | None:
    try:
        with open(f"/proc/self/{name}", encoding="latin-1") as file:
            return file.read()
    except OSError:
        return None


def _write(name: str, value: str | None) -> None:
    if value is not None:
        with open(f"/proc/self/{name}", "w", encoding="latin-1") as file:
            file.write(value)


def _enter_cgroup(text: str | None) -> None:
    """Enter the control groups that /proc/PID/cgroup of another process lists."""
    for line in (text or "").splitlines():
        _, controllers, path = line.split(":", 2)
        base = "/sys/fs/cgroup"
        if controllers:  # version 1 has a tree for each set of controllers
            base = f"{base}/{controllers.removeprefix('name=')}"
        with open(f"{base}{path}/cgroup.procs", "w", encoding="latin-1") as file:
            file.write("0")
