"""Processes that are not the tests' own children, watched until they end; and who has what open."""

import contextlib
import os
import select
from pathlib import Path

_END_TIMEOUT_MS = 20_000  # workers take about 10 ms


class Watched:
    """Some processes; how they end does not matter, only that they do."""

    def __init__(self, pids):
        self.pids = list(pids)
        self._pidfds = [os.pidfd_open(pid) for pid in self.pids]

    def wait_for_the_end(self):
        """Wait until all have ended; has to be called, or their descriptors stay open."""
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


def workers_of(parent):
    """Return the worker processes that a process has now."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [
        pid
        for pid in children
        if b"shmload.workers.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def users_of(name):
    """Return the processes that have a shared memory object open or mapped, named or not."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            opened = [os.readlink(path) for path in (process / "fd").iterdir()]
            if name in "\n".join([*opened, (process / "maps").read_text()]):
                found.add(int(process.name))
    return found
