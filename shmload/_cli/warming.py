"""Several sources at once: each is warmed by a child process, a few of them at a time.

Guarantee: when the command ends, however it ends but by SIGKILL, its children have ended, and what
they had begun is removed.
"""

import json
import os
import select
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmload._checkpoints.resolve import resolve
from shmload._ipc.child import Child, child_environment
from shmload.errors import ShmloadError

# After which a child that was asked to end is killed.
_END_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Task:
    """A source to warm."""

    source: str
    options: tuple[str, ...]
    """Of `shmload warm`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a task."""

    number: int
    """Of the task, counted from 0."""
    report: dict[str, Any]
    """What `shmload warm --json` says of the source; it has `error` if that failed."""
    text: str
    """What `shmload warm` prints of it; empty if it failed."""


@dataclass(frozen=True, slots=True)
class _Running:
    number: int
    child: Child
    output: int
    """A file in memory, which its standard output goes to."""


def warm_all(tasks: Sequence[Task], order: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Warm sources in child processes, and yield what came of each as it ends.

    A child's errors go to this process's standard error.

    Args:
        tasks: what to warm.
        order: the tasks' numbers, in the order in which they begin.
        jobs: how many at a time.

    Raises:
        OSError: a process cannot be started.
    """
    waiting = deque(order)
    running: dict[int, _Running] = {}
    poll = select.poll()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number = waiting.popleft()
                begun = _start(number, tasks[number])
                running[begun.child.pidfd] = begun
                poll.register(begun.child.pidfd, select.POLLIN)
            for fd, _ in poll.poll():
                poll.unregister(fd)
                ended = running.pop(fd)
                yield _finish(ended, tasks[ended.number])
    finally:
        for each in running.values():
            each.child.process.terminate()
        for each in running.values():
            each.child.end(_END_TIMEOUT_S, ask=False)
            os.close(each.output)


def by_size(tasks: Sequence[Task]) -> list[int]:
    """Return the tasks' numbers, that of the largest source first.

    The size is that of its files of weights on this machine. What is not here yet, such as a model
    on the hub, comes before all.
    """
    return sorted(range(len(tasks)), key=lambda number: _size(tasks[number]), reverse=True)


def _size(task: Task) -> tuple[bool, int]:
    """Return whether the size is unknown, and the size in bytes."""
    root = Path(task.source)
    if not os.path.exists(root):  # Path.exists raises if the name is too long
        return True, 0
    try:
        found = resolve(task.source, root)
        return False, sum(shard.stat().st_size for shard in set(found.shards))
    except (ShmloadError, OSError):  # warming it says what is wrong
        return False, 0


def _start(number: int, task: Task) -> _Running:
    output = os.memfd_create("shmload-warm", os.MFD_CLOEXEC)
    try:
        child = Child(
            "shmload",
            ["warm", "--json", "--with-text", "--quiet", *task.options, "--", task.source],
            env=child_environment(),
            stdout=output,
        )
    except BaseException:
        os.close(output)
        raise
    return _Running(number, child, output)


def _finish(ended: _Running, task: Task) -> Outcome:
    how = ended.child.close()
    with open(ended.output, "rb") as file:
        file.seek(0)  # the offset is the child's too
        printed = file.read()
    try:
        # Libraries may print before it.
        answer = json.loads(printed[printed.rfind(b"\n{\n") + 1 :])
        return Outcome(ended.number, answer["reports"][0], answer["texts"][0])
    except (ValueError, KeyError, IndexError):
        error = f"the process that warms it ended ({how})"
        return Outcome(ended.number, {"source": task.source, "error": error}, "")
