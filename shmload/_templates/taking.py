"""Takes over what a caller has: limits, priorities, cores, signals, control group, descriptors.

The caller says what only it can know (`Standing`); the rest is read here of the kernel.
"""

import faulthandler
import fcntl
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from shmload._templates import wire
from shmload._templates.caller import Doubt
from shmload._templates.kind import cgroup_folders, control, said_of, system_call
from shmload._templates.messages import Standing

# sched(7); not in the module os.
_DEADLINE = 6
# ioprio_set(2)
_IOPRIO_WHO_PROCESS = 1
# prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


def take_standing(caller: int, said: Standing) -> None:
    """Give this process the standing of another; all but signals. See `kind`.

    Args:
        caller: its process id; the calling code makes sure that it is still that process.
        said: what it says itself.

    Raises:
        Doubt: the kernel refuses a part, or it cannot be given after a process has started.
    """
    for part, take in _PARTS.items():
        try:
            take(caller, said)
        except (OSError, ValueError) as exc:
            reason = f"the caller's {part} cannot be taken over: {exc}"
            raise Doubt(reason, is_replaceable=True) from exc


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
    policy, priority = os.sched_getscheduler(caller), os.sched_getparam(caller)
    is_own = (policy, priority) == (os.sched_getscheduler(0), os.sched_getparam(0))
    if not is_own and policy != _DEADLINE:  # it has more than a priority
        os.sched_setscheduler(0, policy, priority)
    niceness = os.getpriority(os.PRIO_PROCESS, caller)
    if niceness != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _take_io_priority(caller: int, _: Standing) -> None:
    wanted, own = (system_call("ioprio_get", _IOPRIO_WHO_PROCESS, pid) for pid in (caller, 0))
    if wanted != own and system_call("ioprio_set", _IOPRIO_WHO_PROCESS, 0, wanted) < 0:
        raise PermissionError("the kernel refuses")


def _take_limits(caller: int, _: Standing) -> None:
    kinds = {getattr(resource, name) for name in vars(resource) if name.startswith("RLIMIT_")}
    for kind in kinds:
        wanted, own = resource.prlimit(caller, kind), resource.getrlimit(kind)
        if kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA) and wanted[0] != -1:
            raise Doubt(
                "the caller's limits cannot be taken over: a copy of a template has more memory "
                "than a new Python"
            )
        if kind == resource.RLIMIT_STACK and wanted != own:
            raise ValueError("the room for stacks is chosen when a process starts")
        if wanted != own:
            resource.setrlimit(kind, wanted)


def _take_cgroup(caller: int, _: Standing) -> None:
    own, wanted = said_of("self", "cgroup") or "", said_of(caller, "cgroup") or ""
    if own == wanted:
        return
    for line, folder in cgroup_folders(wanted).items():
        if line not in own.splitlines():
            with open(f"{folder}/cgroup.procs", "w", encoding="latin-1") as file:
                file.write("0")


def _write_own(name: str, wanted: int | str, prefix: str = "") -> None:
    """Write this process's file of /proc as another process has it, or as that one says."""
    value = said_of(wanted, name) if isinstance(wanted, int) else wanted
    if value and said_of("self", name) != value:
        with open(f"/proc/self/{name}", "w", encoding="latin-1") as file:
            file.write(prefix + value)


_PARTS: dict[str, Callable[[int, Standing], object]] = {
    "control group": _take_cgroup,
    "cores": _take_cores,
    "scheduling": _take_scheduling,
    "I/O priority": _take_io_priority,
    "oom_score_adj": lambda caller, _: _write_own("oom_score_adj", caller),
    # As it is read, it would be taken for octal.
    "coredump_filter": lambda caller, _: _write_own("coredump_filter", caller, "0x"),
    "timer slack": lambda _, said: _write_own("timerslack_ns", said.timer_slack),
    "limits": _take_limits,
    "child subreaper": lambda _, said: control(_PR_SET_CHILD_SUBREAPER, said.is_subreaper),
    "umask": lambda _, said: os.umask(said.umask),
}
"""How each thing is taken over; signals, descriptors and variables by functions of their own."""


# Descriptors and streams ------------------------------------------------------------------------


def take_descriptors(
    wanted: list[int], fds: list[int], channel: wire.Socket, keep: set[int]
) -> wire.Socket:
    """Give each descriptor the number that it has in the caller, and close all others.

    Args:
        wanted: the numbers.
        fds: the caller's directory, which becomes this process's, and a descriptor for each number.
        channel: stays open, at a number of its own.
        keep: stay open: libraries have opened them.

    Returns:
        The channel.

    Raises:
        Doubt: a number of `keep` is wanted: libraries have opened it.
        OSError: there are no descriptors left.
    """
    directory, *fds = fds
    os.fchdir(directory)
    os.close(directory)
    if keep & set(wanted):
        raise Doubt(f"libraries have opened descriptors {sorted(keep & set(wanted))}")
    above = max([*wanted, *keep, *fds, 63]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    own = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    channel.detach()
    wire.close_others({*moved, own, *keep})
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    return wire.take(own)


def renew_streams() -> None:
    """Open the standard streams anew, as Python does when it starts.

    They keep their objects, which libraries may hold from their imports on.
    """
    for fd, name in enumerate(("stdin", "stdout")):
        _open_again(fd, name, getattr(sys, name))
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _open_again(fd: int, name: str, stream: Any) -> None:
    """Open a standard stream; see create_stdio in CPython's pylifecycle.c.

    Args:
        fd: its descriptor.
        name: stdin or stdout.
        stream: the template's, whose encoding is that of the locale, which both share.
    """
    mode = "r" if name == "stdin" else "w"
    is_unbuffered = stream.write_through and mode == "w"
    buffering = 0 if is_unbuffered else -1
    buffer: Any = open(fd, mode + "b", buffering, closefd=False)  # noqa: SIM115 for the whole process
    (buffer if is_unbuffered else buffer.raw).name = f"<{name}>"
    stream.__init__(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=os.isatty(fd) and not is_unbuffered,
        write_through=is_unbuffered,
    )
    stream.mode = mode
