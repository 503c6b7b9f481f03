"""How a caller stands with the kernel, as far as only it can say: umask and signals.

What else the kernel tells of it is read by the process that runs its program; see `taking`.
"""

from shmload._templates.inherited import is_subreaper
from shmload._templates.messages import Standing
from shmload._templates.rights import read_status


def own_standing() -> Standing:
    """Return what only this process can say of its standing."""
    status = read_status()
    return Standing(
        blocked=int(status["SigBlk"], 16),
        ignored=int(status["SigIgn"], 16),
        timer_slack=_timer_slack(),
        umask=int(status["Umask"], 8),
        is_subreaper=int(is_subreaper()),
    )


def _timer_slack() -> str:
    try:
        with open("/proc/self/timerslack_ns", "rb", buffering=0) as file:
            return file.read().decode("ascii")
    except OSError:
        return ""
