"""Takes over how a caller stands: limits, priorities, cores, signals, control group.

The caller says what only it can know (`standing`); the rest is read here of the kernel.
"""

import faulthandler
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

from shmload._templates import inherited
from shmload._templates.messages import Standing
from shmload._templates.rights import cgroup_folders

# sched_setattr(2) and ioprio_set(2)
_ATTRIBUTES_NBYTES = 56
_FLAGS_AT = 8
_IOPRIO_WHO_PROCESS = 1
# prctl(2)
_PR_SET_CHILD_SUBREAPER, _PR_SCHED_CORE = 36, 62
_CORE_GET, _CORE_SHARE_FROM = 0, 3
_COOKIE_NBYTES = 8


class CannotTake(Exception):
    """The program cannot be given its caller's standing; str says which part."""


class NeverTaken(CannotTake):
    """No template can give it."""


def take_standing(caller: int, said: Standing) -> None:
    """Give this process the standing of another; all but signals. See `inherited`.

    Args:
        caller: its process id; the calling code makes sure that it is still that process.
        said: what it says itself.

    Raises:
        CannotTake: the kernel refuses a part, or it cannot be given after a process has started.
    """
    for part, take in _PARTS.items():
        try:
            take(caller, said)
        except (OSError, ValueError) as exc:
            raise CannotTake(f"the caller's {part} cannot be taken over: {exc}") from exc


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


def _take_cores(caller: int, _: Standing) -> None:
    if os.sched_getaffinity(0) != (cores := os.sched_getaffinity(caller)):
        os.sched_setaffinity(0, cores)


def _take_scheduling(caller: int, _: Standing) -> None:
    """Take over policy, priority, niceness, deadlines and clamps."""
    wanted, own = map(_attributes_of, (caller, 0))
    if wanted == own:
        return
    if wanted is None:  # no such call here
        os.sched_setscheduler(0, os.sched_getscheduler(caller), os.sched_getparam(caller))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, caller))
    elif inherited.system_call("sched_setattr", 0, wanted, 0) < 0:
        raise PermissionError("the kernel refuses")


def _attributes_of(pid: int) -> bytes | None:
    found = bytes(_ATTRIBUTES_NBYTES)  # a new object, so the kernel may write there
    size = len(found)
    if inherited.system_call("sched_getattr", pid, found, size, 0) < 0:
        return None
    # What is to be clamped must be said when it is set; the kernel does not say it.
    clamps = found[-8:]
    flags = int.from_bytes(found[_FLAGS_AT : _FLAGS_AT + 8], "little") | (
        0x60 if any(clamps) else 0
    )
    return found[:_FLAGS_AT] + flags.to_bytes(8, "little") + found[_FLAGS_AT + 8 :]


def _take_core_cookie(caller: int, _: Standing) -> None:
    if _core_cookie_of(caller) != _core_cookie_of(0):
        answer = inherited.control(_PR_SCHED_CORE, _CORE_SHARE_FROM, caller, 0, 0)
        if answer < 0:
            raise PermissionError("the kernel refuses")


def _core_cookie_of(pid: int) -> bytes:
    found = bytes(_COOKIE_NBYTES)  # a new object, so the kernel may write there
    inherited.control(_PR_SCHED_CORE, _CORE_GET, pid, 0, found)
    return found


def _take_io_priority(caller: int, _: Standing) -> None:
    wanted, own = (
        inherited.system_call("ioprio_get", _IOPRIO_WHO_PROCESS, pid) for pid in (caller, 0)
    )
    if wanted != own and inherited.system_call("ioprio_set", _IOPRIO_WHO_PROCESS, 0, wanted) < 0:
        raise PermissionError("the kernel refuses")


def _take_coredump_filter(caller: int, _: Standing) -> None:
    own, wanted = _read("self", "coredump_filter"), _read(caller, "coredump_filter")
    if wanted is not None and own != wanted:
        _write("coredump_filter", f"0x{wanted}")  # as it is read, it would be taken for octal


def _take_subreaper(_: int, said: Standing) -> None:
    inherited.control(_PR_SET_CHILD_SUBREAPER, said.is_subreaper)


def _take_umask(_: int, said: Standing) -> None:
    os.umask(said.umask)


def _take_limits(caller: int, _: Standing) -> None:
    kinds = {getattr(resource, name) for name in vars(resource) if name.startswith("RLIMIT_")}
    for kind in kinds:
        wanted, own = resource.prlimit(caller, kind), resource.getrlimit(kind)
        if kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA) and wanted[0] != -1:
            raise NeverTaken(
                "the caller's limits cannot be taken over: a copy of a template has more memory "
                "than a new Python"
            )
        if kind == resource.RLIMIT_STACK and wanted != own:
            raise ValueError("the room for stacks is chosen when a process starts")
        if wanted != own:
            resource.setrlimit(kind, wanted)


def _take_cgroup(caller: int, _: Standing) -> None:
    own, wanted = _read("self", "cgroup") or "", _read(caller, "cgroup") or ""
    if own == wanted:
        return
    for line, folder in cgroup_folders(wanted).items():
        if line not in own.splitlines():
            with open(f"{folder}/cgroup.procs", "w", encoding="latin-1") as file:
                file.write("0")


def _take_file(name: str, value: str | None) -> None:
    if value is not None and _read("self", name) != value:
        _write(name, value)


def _write(name: str, value: str) -> None:
    with open(f"/proc/self/{name}", "w", encoding="latin-1") as file:
        file.write(value)


def _read(pid: int | str, name: str) -> str | None:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return None


_PARTS: dict[str, Callable[[int, Standing], None]] = {
    "control group": _take_cgroup,
    "cores": _take_cores,
    "scheduling": _take_scheduling,
    "core scheduling": _take_core_cookie,
    "I/O priority": _take_io_priority,
    "oom_score_adj": lambda caller, _: _take_file("oom_score_adj", _read(caller, "oom_score_adj")),
    "coredump_filter": _take_coredump_filter,
    "timer slack": lambda _, said: _take_file("timerslack_ns", said.timer_slack or None),
    "limits": _take_limits,
    "child subreaper": _take_subreaper,
    "umask": _take_umask,
}
"""How each thing is taken over that `inherited` says is taken; signals, descriptors and variables
are taken over by functions of their own."""
