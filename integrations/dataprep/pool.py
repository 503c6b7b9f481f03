"""The processes of a job, and which of them has which task.

Guarantee: every task has one outcome, whichever processes end. The item at which a process ends is
done again; the one at which three have ended is given up.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator
from multiprocessing import connection
from typing import Any, NamedTuple

from shmload.errors import ArgumentError, JobError
from shmload.integrations.dataprep.crossing import load
from shmload.integrations.dataprep.processes import ForkServer, Process, Setup
from shmload.integrations.dataprep.runner import Entry
from shmload.integrations.dataprep.shards import Row, Task

_ENDED = (
    "a process of the job ended before it could work; what it printed says why, or dmesg if the "
    "kernel ran out of memory"
)
# An item at which so many processes have ended is given up.
_ATTEMPTS = 3
_BATCH_ITEMS = 16
_QUICK_S = 0.1
_LOOK_S = 1.0


class Outcome(NamedTuple):
    """What has become of an item, or of a shard: a value, or an error."""

    row: Row
    """The item; of a shard the one at which its process was."""
    value: Any
    error: BaseException | None = None


class _Runner(Process):
    """A process of the pool, and what it works on."""

    def __init__(self, server: ForkServer, place: int, task: Task) -> None:
        super().__init__(server, Entry(server.setup, place))
        self.place = place
        self.task: Task | None = task
        self.batch = 1
        """How many items it gets at once."""
        self._function = b""

    def post(self, task: Task, function: bytes) -> None:
        """Send it a task, once it is ready, and the job's function if that is another one."""
        self.task, self.posted_at = task, time.monotonic()
        self.memory.clear()
        is_same = function is self._function
        self._function = function
        try:
            self.connection.send((None if is_same else function, task))
        except OSError:  # it takes no more, and may have half a message; its end is seen
            self.kill()

    @property
    def row(self) -> Row:
        """The item that it is at, or its first."""
        assert self.task
        rows, number = self.task.rows, self.memory.notes[0]
        return next((row for row in rows if row.number == number), rows[0])


class Pool:
    """Up to `count` processes for any number of runs, in one thread at a time; ended by `close`.

    Args:
        setup: what the processes are made of.
        count: how many.
        timeout_s: a process that needs longer for an item counts as hung; None for never.
    """

    def __init__(self, setup: Setup, count: int, timeout_s: float | None) -> None:
        self._count = count
        self._timeout_s = timeout_s
        self._server = ForkServer(setup)
        self._runners: list[_Runner] = []
        self._again: deque[Task] = deque()
        self._done = 0
        self._is_running = self._is_closed = False

    def close(self) -> None:
        """End all processes and wait for that; in a forked child do nothing."""
        self._is_closed = True
        if os.getpid() == self._server.setup.owner:
            self._end(self._runners)
            self._server.close()

    def run(
        self,
        function: bytes,
        take: Callable[[int], Task | None],
        show: Callable[[int], object],
    ) -> Generator[Outcome]:
        """Yield what becomes of each item, or of each shard. No process starts before the first.

        Closing the iterator, or an error, ends the processes that are at work.

        Args:
            function: of the job, pickled.
            take: returns the next task, of at most so many items if it is no shard; None if there
                is none now, and none at all if no process has one.
            show: is called with the number of items that are done.

        Raises:
            ArgumentError: the job is closed, at another map, or belongs to another process.
            JobError: a process ended before it could work.
            Exception: the pipeline cannot be loaded, or not moved to its device.
        """
        if (owner := self._server.setup.owner) != os.getpid():
            raise ArgumentError(f"this job belongs to process {owner}; make another one here")
        if self._is_running:
            raise ArgumentError("this job is at another map; end that first, or make another job")
        self._is_running, self._done = True, 0
        for runner in self._runners:
            runner.batch = 1  # another function may take longer
        try:
            while self._hand_out(function, take):
                yield from self._wait(function)
                busy = [runner for runner in self._runners if runner.task]
                show(self._done + sum(max(0, runner.memory.notes[1] - 1) for runner in busy))
        finally:
            self._is_running = False
            self._again.clear()
            self._end([each for each in self._runners if each.task])

    def _end(self, runners: list[_Runner]) -> None:
        for runner in runners:
            runner.kill()  # all of them, before the first is waited for
        for runner in list(runners):
            self._runners.remove(runner)
            runner.end()

    def _hand_out(self, function: bytes, take: Callable[[int], Task | None]) -> bool:
        """Give tasks to processes that have none; return whether any has one."""
        if self._is_closed:
            raise ArgumentError("this job is closed; make another one")
        idle = [runner for runner in self._runners if not runner.task]
        while idle or len(self._runners) < self._count:
            task = self._again.popleft() if self._again else take(idle[-1].batch if idle else 1)
            if not task:
                break
            if idle:
                idle.pop().post(task, function)
            else:
                place = min({*range(self._count)} - {runner.place for runner in self._runners})
                self._runners.append(_Runner(self._server, place, task))
        return any(runner.task for runner in self._runners)

    def _wait(self, function: bytes) -> list[Outcome]:
        """Wait for news of the processes that have a task; return what has become of items."""
        busy = [runner for runner in self._runners if runner.task]
        ends = [runner.sentinel for runner in busy if runner.pid]
        ready = connection.wait([*ends, *(runner.connection for runner in busy)], _LOOK_S)
        outcomes = []
        for runner in busy:
            if runner.connection in ready:
                outcomes += self._hear(runner, function)
            elif runner.sentinel in ready:
                self._bury(runner)
            elif runner.pid and self._timeout_s and runner.memory.notes[2] > self._timeout_s:
                self._bury(runner, f"nothing within {self._timeout_s:g} s")
        return outcomes

    def _hear(self, runner: _Runner, function: bytes) -> list[Outcome]:
        """Take a process's message.

        Raises:
            JobError, Exception: as `run`.
        """
        try:
            kind, parcels = runner.connection.recv()
            if kind == "ready":
                runner.begin()
        except (EOFError, OSError):
            self._bury(runner)
            return []
        task = runner.task
        assert task
        if kind == "broken":
            _, error = load(parcels[0], runner.memory)
            raise error or JobError(_ENDED)
        if kind == "ready":
            runner.post(task, function)
            return []
        rows = [runner.row] if task.path else task.rows[: len(parcels)]
        rest = [] if task.path else task.rows[len(parcels) :]
        if rest:
            self._again.append(Task(rest))
            runner.batch = len(rows)
        elif time.monotonic() - runner.posted_at < _QUICK_S:
            runner.batch = min(2 * runner.batch, _BATCH_ITEMS)
        runner.task = None
        self._done += len(task.rows) - len(rest)
        results = [load(parcel, runner.memory) for parcel in parcels]
        return [Outcome(row, *result) for row, result in zip(rows, results, strict=True)]

    def _bury(self, runner: _Runner, how: str = "") -> None:
        """End a process, and have another one do its task.

        Args:
            runner: the process.
            how: it has ended; empty if it has done so by itself.

        Raises:
            JobError: as `run`.
        """
        task, row = runner.task, runner.row
        assert task
        self._runners.remove(runner)
        ending = runner.end()
        if not runner.pid:
            raise JobError(_ENDED)
        others = [each for each in task.rows if each is not row]
        row = row._replace(endings=(*row.endings, how or ending))
        if len(row.endings) == _ATTEMPTS:
            refusal = f"{_ATTEMPTS} processes ended at it ({', '.join(row.endings)})"
            if "SIGKILL" in row.endings:
                refusal += "; perhaps the kernel ran out of memory, see dmesg"
            row = row._replace(refusal=refusal)
        # `_again` goes before new tasks, so little is lost if another process ends.
        self._again.append(task._replace(rows=[row, *others]))
