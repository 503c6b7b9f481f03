"""This process, as the kernel treats it: when it ends, and what goes first."""

import contextlib
import os
import signal

from shmload._host.memory import call

_PR_SET_PDEATHSIG = 1
# Its number where glibc is found most; linux/ioprio.h.
_SYS_IOPRIO_SET = {"aarch64": 30, "x86_64": 251}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13


def die_with_parent() -> None:
    """Tell the kernel to kill this process when the thread that forked it ends.

    Raises:
        OSError: the kernel refuses; not known to happen.
    """
    # linux/prctl.h
    if code := call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(code, "prctl(PR_SET_PDEATHSIG)")


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


def has_pidfds() -> bool:
    """Tell whether pidfds can be opened; a sandbox may forbid it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
