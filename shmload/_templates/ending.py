"""How a process has ended, and how another one ends likewise."""

import fcntl
import os
import time

from shmload._templates.signals import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# include/uapi/linux/pidfd.h, since Linux 6.15: how a process that is no child has ended.
_PIDFD_INFO_EXIT = 1 << 3
_INFO_NBYTES = 64
_PIDFD_GET_INFO = 3 << 30 | _INFO_NBYTES << 16 | 0xFF << 8 | 11
# Some first processes look for the dead every few seconds only.
_REAPED_TIMEOUT_S = 5.0
_EXIT_CODE = -1
"""Where it is in /proc/PID/stat."""


def end_as(status: int) -> "NoReturn":
    """End this process as another one has ended, by its status from `os.waitpid`."""
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def status_of_ended(pid: int, pidfd: int) -> int | None:
    """Return the status of a process that has ended, or None where the kernel does not say it.

    Args:
        pid: its process id, which may be another's once it is reaped.
        pidfd: holds the process itself.
    """
    deadline = time.monotonic() + _REAPED_TIMEOUT_S
    while time.monotonic() < deadline:
        status = _status_before_reaped(pid, pidfd)
        if status is not None:
            return status
        info = bytearray(_PIDFD_INFO_EXIT.to_bytes(8, "little") + bytes(_INFO_NBYTES - 8))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
            if info[0] & _PIDFD_INFO_EXIT:
                return int.from_bytes(info[-4:], "little", signed=True)
        except ProcessLookupError:  # not reaped yet, or this kernel does not know the request
            pass
        except OSError:
            return None
        time.sleep(0.005)
    return None


def _status_before_reaped(pid: int, pidfd: int) -> int | None:
    """Return the status of a process that has ended and that its parent has not asked for."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            status = int(file.read().split()[_EXIT_CODE])
        with open(f"/proc/self/fdinfo/{pidfd}", "rb", buffering=0) as file:
            is_there = b"\nPid:\t%d\n" % pid in file.read()
    except OSError:
        return None
    return status if is_there else None
