"""The processes of a job, and which of them has which task.

Guarantee: every task has one outcome, whichever processes end. The item at which a process ends is
done again; the one at which three have ended is given up.
"""

import contextlib
import functools
import os
import pickle
import reprlib
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, NamedTuple

from shmload.errors import ArgumentError, ItemFailed, JobError
from shmload.integrations.dataprep.bar import Bar
from shmload.integrations.dataprep.crossing import Channel, Part, load
from shmload.integrations.dataprep.launch import ForkServer, Process
from shmload.integrations.dataprep.prepared import Setup
from shmload.integrations.dataprep.runner import serve
from shmload.integrations.dataprep.shards import Row, Shard

_ATTEMPTS = 3
"""So many processes may end at an item, or one after the other before they are ready."""
_STUCK_S = 60
"""A process that is in the middle of a message for so long counts as ended."""
_START_TIMEOUT_S = 3600.0
_LOOK_S = 1.0
# Enough of an item to recognize it, such as a path.
_ITEM = reprlib.Repr()
_ITEM.maxstring = _ITEM.maxother = 200


@dataclass
class Task:
    """An item whose result is returned, or the items of a shard."""

    number: int
    rows: list[Row]
    shard: Shard | None = None
    item: Any = None
    """As it was given, if there is one."""
    endings: dict[int, list[str]] = field(default_factory=dict)
    """How processes have ended at its items, by number."""
    killed: dict[int, str] = field(default_factory=dict)
    """Errors of these items, by number; empty if the item is to be done again."""

    def note_end(self, row: Row, how: str) -> ItemFailed | None:
        """Note that a process has ended at an item; return an error if that is given up."""
        endings = self.endings.setdefault(row.number, [])
        endings.append(how)
        item = row.key if self.shard else self.item
        error = None
        if len(endings) == _ATTEMPTS:
            hint = ""
            if "SIGKILL" in endings:
                hint = "; perhaps the kernel ran out of memory, see dmesg"
            reason = f"{len(endings)} processes ended at it ({', '.join(endings)}){hint}"
            error = item_failed(row.number, item, reason, endings)
        self.killed[row.number] = error.reason if error else ""
        return error


def item_failed(index: int, item: object, reason: str, endings: Sequence[str] = ()) -> ItemFailed:
    """Return the error of an item; see `ItemFailed`."""
    text = f"item {index}, {_ITEM.repr(item)}: {reason}"
    return ItemFailed(text, index=index, item=item, reason=reason, endings=tuple(endings))


class Outcome(NamedTuple):
    """What has become of a task: a value, or an error; and the item that its process was at."""

    task: Task
    value: Any
    error: BaseException | None
    row: Row


class Work(NamedTuple):
    """What a pool is to do in one run."""

    function: bytes
    """Of the job, pickled."""
    take: Callable[[], Task | None]
    """Returns the next task; None if there is none now, and none at all if no process has one."""
    bar: Bar
    lock: int = -1
    """A descriptor whose lock lasts as long as a process works; -1 for none."""


class _Runner:
    """A process of the pool, and what it works on."""

    def __init__(
        self, server: ForkServer, place: int, task: Task, on_wait: Callable[[], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.channel.limit(_STUCK_S)
        self.place = place
        self.task: Task | None = task
        self.row = task.rows[0]
        """The item that it is at."""
        self.begun = 0
        self.is_ready = False
        self.since = time.monotonic()
        self.process = Process(server, serve, (theirs, server.setup, place))
        try:
            with theirs:
                self.process.start(on_wait)
        except BaseException:
            ours.close()
            raise

    def begin(self, work: Work) -> None:
        """Tell it what to work with, once it is ready."""
        self._send("begin", work.function, b"lock" if work.lock >= 0 else b"")
        if work.lock >= 0:
            with contextlib.suppress(OSError):
                socket.send_fds(self.channel.socket, [b"L"], [work.lock])

    def post(self, task: Task) -> None:
        """Send it a task, once it is ready."""
        self.task, self.row, self.begun, self.since = task, task.rows[0], 0, time.monotonic()
        self._send("task", pickle.dumps((task.shard, task.rows, task.killed)))

    def _send(self, kind: str, *parts: Part) -> None:
        try:
            self.channel.send(kind, *parts)
        except OSError:  # it takes no more, and may have half a message; its end is seen
            self.process.kill()

    def end(self) -> str:
        """End it, and say how it has ended."""
        self.channel.close()
        return self.process.end()


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
        self._failed_starts = 0
        self._is_running = self._is_closed = False

    def close(self) -> None:
        """End all processes and wait for that; in a forked child do nothing."""
        self._is_closed = True
        if os.getpid() == self._server.setup.owner:
            self._end(self._runners)
            self._server.close()

    def run(self, work: Work) -> Generator[Outcome]:
        """Yield what becomes of each task. No process starts before the first task.

        Closing the iterator, or an error, ends the processes that are at work.

        Raises:
            ArgumentError: the job is closed, at another map, or belongs to another process.
            JobError: the processes keep ending before they can work.
            Exception: the pipeline cannot be loaded, or not moved to its device.
        """
        if (owner := self._server.setup.owner) != os.getpid():
            raise ArgumentError(f"this job belongs to process {owner}; make another one here")
        if self._is_closed:
            raise ArgumentError("this job is closed; make another one")
        if self._is_running:
            raise ArgumentError("this job is at another map; end that first, or make another job")
        self._is_running = True
        try:
            for runner in self._runners:
                runner.begin(work)
            while self._hand_out(work):
                for runner, is_readable in self._wait(work.bar):
                    if outcome := self._news(runner, work, is_readable):
                        yield outcome
        finally:
            self._is_running = False
            self._again.clear()
            self._end([each for each in self._runners if each.task])

    def _end(self, runners: list[_Runner]) -> None:
        for runner in runners:
            runner.process.kill()  # all of them, before the first is waited for
        for runner in list(runners):
            self._runners.remove(runner)
            runner.end()

    def _hand_out(self, work: Work) -> bool:
        """Give tasks to processes that have none; return whether any has one."""
        idle = [runner for runner in self._runners if not runner.task]
        while idle or len(self._runners) < self._count:
            task = self._again.popleft() if self._again else work.take()
            if not task:
                break
            if idle:
                idle.pop().post(task)
            else:
                place = min({*range(self._count)} - {runner.place for runner in self._runners})
                look = functools.partial(self._look, work.bar, time.monotonic())
                self._runners.append(_Runner(self._server, place, task, look))
        return any(runner.task for runner in self._runners)

    def _look(self, bar: Bar, began: float) -> None:
        """Look after the fork server, which prepares itself."""
        bar.look(False)
        if time.monotonic() - began > _START_TIMEOUT_S:
            raise JobError(f"the pipeline was not loaded within {_START_TIMEOUT_S:g} s")

    def _wait(self, bar: Bar) -> Iterator[tuple[_Runner, bool]]:
        """Yield the processes that have news, and whether that is a message."""
        busy = [runner for runner in self._runners if runner.task]
        waited = [
            each for runner in busy for each in (runner.channel.socket, runner.process.sentinel)
        ]
        ready = connection.wait(waited, _LOOK_S)
        bar.look(any(runner.is_ready for runner in busy))
        for runner in busy:
            limit = self._timeout_s if runner.is_ready else _START_TIMEOUT_S
            is_late = limit and time.monotonic() - runner.since > limit
            if runner.channel.socket in ready:
                yield runner, True
            elif runner.process.sentinel in ready or is_late:
                yield runner, False

    def _news(self, runner: _Runner, work: Work, is_readable: bool) -> Outcome | None:
        """Take a process's message, or its end; return what has become of its task, if it is over.

        Raises:
            JobError, Exception: as `run`.
        """
        if is_readable:
            with contextlib.suppress(EOFError, OSError):
                return self._take(runner, work, *runner.channel.receive())
        is_late = not is_readable and runner.process.is_alive()
        self._runners.remove(runner)
        how = runner.end()
        if is_late:
            how = f"nothing within {time.monotonic() - runner.since:.0f} s"
        task, row = runner.task, runner.row
        assert task
        if runner.is_ready:
            work.bar.add(-max(0, runner.begun - 1))
            if (error := task.note_end(row, how)) and not task.shard:
                return Outcome(task, None, error, row)
        else:
            self._failed_starts += 1
            if self._failed_starts == _ATTEMPTS:
                raise JobError(f"{_ATTEMPTS} processes ended before they could work; {how}")
        self._again.append(task)
        return None

    def _take(self, runner: _Runner, work: Work, kind: str, parts: list[Part]) -> Outcome | None:
        task = runner.task
        assert task
        runner.since = time.monotonic()
        match kind:
            case "ready":
                self._failed_starts = 0
                runner.is_ready = True
                runner.begin(work)
                runner.post(task)
                return None
            case "broken":
                raise load(parts)
            case "at":
                work.bar.add(min(runner.begun, 1))
                runner.begun += 1
                number = int(bytes(parts[0]))
                runner.row = next(row for row in task.rows if row.number == number)
                return None
        runner.task = None
        work.bar.add(len(task.rows) - max(0, runner.begun - 1))
        try:
            value = load(parts)
        except Exception as exc:  # the result's own unpickling
            return Outcome(task, None, exc, runner.row)
        if kind == "failed":
            return Outcome(task, None, value, runner.row)
        return Outcome(task, value, None, runner.row)
