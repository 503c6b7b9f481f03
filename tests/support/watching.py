"""Waits for what nothing tells of, such as the end of other's children; finds users of memory."""

import contextlib
import os
import select
import time
from pathlib import Path

_DEADLINE_S = 60.0
_PAUSE_S = 0.005
_END_TIMEOUT_MS = 20_000  # workers end within about 10 ms


def until(holds, deadline_s=_DEADLINE_S):
    """Wait until something holds of which nothing tells, and return it.

    Between two looks others have the core: what is waited for may need it.
    """
    deadline = time.monotonic() + deadline_s
    while not (found := holds()):
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(_PAUSE_S)
    return found


class Watched:
    """Processes to wait for; their exit codes do not matter."""

    def __init__(self, pids):
        self.pids = list(pids)
        self._pidfds = [os.pidfd_open(pid) for pid in self.pids]

    def wait_for_the_end(self):
        """Wait until all have ended, and close their pidfds; must be called."""
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        while self._pidfds:
            ended = poll.poll(_END_TIMEOUT_MS)
            assert ended, f"of {self.pids} {len(self._pidfds)} live on"
            for pidfd, _ in ended:
                poll.unregister(pidfd)
                self._pidfds.remove(pidfd)
                os.close(pidfd)


def children_of(parent):
    """Return the pids of a process's children."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that just ended
            found += map(int, children.read_text().split())
    return sorted(found)


def workers_of(parent):
    """Return the pids of a process's workers."""
    found = []
    for pid in children_of(parent):
        with contextlib.suppress(OSError):  # it ended
            if b"shmload.workers.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def users_of(name):
    """Return the pids that have a shared memory object open or mapped, even if it lost its name."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended
            opened = [os.readlink(path) for path in (process / "fd").iterdir()]
            if name in "\n".join([*opened, (process / "maps").read_text()]):
                found.add(int(process.name))
    return found
