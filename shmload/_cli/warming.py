"""Sources that child processes warm: some at a time for a command, a list for the service.

Guarantee: when the command ends, however it ends but by SIGKILL, its children have ended, and what
they had begun is removed. The service never imports torch or the model libraries.
"""

import json
import os
import re
import select
import subprocess
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.wanted import Wanted
from shmload._cli.source_list import ListedSource
from shmload._ipc import procs
from shmload._segments.listing import segments
from shmload._wording import format_nbytes, logger_of
from shmload.errors import ShmloadError

if TYPE_CHECKING:
    from shmload._service.keeper import Keeper

logger = logger_of(__name__)

Outcome = tuple[int, Any, str]
"""The number of a source, its report as of `shmload warm --json`, which has `error` if it failed,
and what `shmload warm` prints of it."""

_LOGGER_NAME = re.compile(r"^shmload[\w.]*: ")  # at the beginning of a line that a child logs
_ERROR_PREFIX = "shmload: "  # as the command line prints the errors of this package
# After which a child that was asked to end is killed: by the command, by the service.
_END_TIMEOUT_S, _SERVICE_END_TIMEOUT_S = 15.0, 5.0


class Warming:
    """A child process that warms one source.

    Args:
        wanted: what to warm.
        verbose: log each step.
        stderr: as for `procs.start`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        wanted: ListedSource,
        *,
        verbose: bool = False,
        stderr: int | None = None,
    ) -> None:
        self.source = wanted.source
        self._output = os.memfd_create("shmload-warm", os.MFD_CLOEXEC)
        options = ["--json", "--with-text", "--quiet", *wanted.options, "--", wanted.source]
        try:
            self.child = procs.start(
                "shmload",
                *(*(["--verbose"] if verbose else []), "warm", *options),
                env=procs.child_environment(),
                stdout=self._output,
                stderr=stderr,
            )
        except BaseException:
            os.close(self._output)
            raise

    def answer(self) -> tuple[dict[str, Any], str] | None:
        """Read what the ended child printed, once: the report of its source, and what to say of it.

        None if there is no report. Libraries may print before it.
        """
        with open(self._output, "rb") as file:
            file.seek(0)  # the offset is the child's too
            printed = file.read()
        try:
            answer = json.loads(printed[printed.rfind(b"\n{\n") + 1 :])
            return answer["reports"][0], answer["texts"][0]
        except (ValueError, KeyError, IndexError):
            return None


# For a command ------------------------------------------------------------------------------------


def warm_all(sources: Sequence[ListedSource], order: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Warm sources in child processes, and yield what came of each as it ends.

    A child's errors go to this process's standard error.

    Args:
        sources: what to warm.
        order: their numbers, in the order in which they begin.
        jobs: how many at a time.

    Raises:
        OSError: a process cannot be started.
    """
    waiting = deque(order)
    running: dict[int, tuple[int, Warming]] = {}
    poll = select.poll()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number = waiting.popleft()
                begun = Warming(sources[number])
                running[begun.child.pidfd] = number, begun
                poll.register(begun.child.pidfd, select.POLLIN)
            for fd, _ in poll.poll():
                poll.unregister(fd)
                number, ended = running.pop(fd)
                how = ended.child.close()
                error = f"the process that warms it ended ({how})"
                failure = {"source": ended.source, "error": error}, ""
                yield number, *(ended.answer() or failure)
    finally:
        for _, each in running.values():
            each.child.process.terminate()
        for _, each in running.values():
            each.child.end(_END_TIMEOUT_S, ask=False)
            each.answer()  # closes its output


def by_size(sources: Sequence[ListedSource]) -> list[int]:
    """Return the sources' numbers, that of the largest first.

    The size is that of its files of weights on this machine. What is not here yet, such as a model
    on the hub, comes before all.
    """
    return sorted(range(len(sources)), key=lambda n: _size(sources[n].source), reverse=True)


def _size(source: str) -> tuple[bool, int]:
    """Return whether the size is unknown, and the size in bytes."""
    root = Path(source)
    if not os.path.exists(root):  # Path.exists raises if the name is too long
        return True, 0
    try:
        found = resolve(Wanted(source=source), root)
        return False, sum(shard.stat().st_size for shard in set(found.shards))
    except (ShmloadError, OSError):  # warming it says what is wrong
        return False, 0


# For the service ----------------------------------------------------------------------------------


def preload(wanted: Sequence[ListedSource], keeper: "Keeper") -> None:
    """Warm sources one after the other; log errors and go on with the next source.

    A child process warms each source. Returns early when the service ends.
    """
    made: dict[str, ListedSource] = {}
    for each in wanted:
        if keeper.is_stopping:
            return
        report = _preload_one(each, keeper)
        keeper.note_preloaded(is_resident=report is not None)
        if report:
            nbytes = report["resident_nbytes"]
            amount = format_nbytes(nbytes)
            more = each.fields | {"nbytes": nbytes}
            logger.info("preloaded %s: %s", each.source, amount, extra=more)
            made.update(dict.fromkeys(report["segments"], each))
            evicted = {name for gone in report["evicted"] for name in gone["segments"]}
            _report_evicted(made, each, evicted)


def _preload_one(wanted: ListedSource, keeper: "Keeper") -> dict[str, Any] | None:
    """Warm one source; None if that failed, which is logged, or if the service ends."""
    error: str | None
    try:
        warming = Warming(wanted, verbose=True, stderr=subprocess.PIPE)
    except OSError as exc:
        error = f"no process for it: {exc}"
    else:
        try:
            error = _log_lines(warming.child, wanted, keeper)
        finally:
            how = warming.child.end(_SERVICE_END_TIMEOUT_S, ask=keeper.is_stopping)
            answer = warming.answer()
        has_failed = warming.child.process.returncode != 0
        if answer and not has_failed:
            return answer[0]
        error = error or (
            f"its process ended ({how})" if has_failed else "its process printed no report"
        )
    if not keeper.is_stopping:
        logger.error("line %d cannot be preloaded: %s", wanted.line, error, extra=wanted.fields)
    return None


def _log_lines(child: procs.Child, wanted: ListedSource, keeper: "Keeper") -> str | None:
    """Log what a child logs, until it or the service ends; returns its error."""
    error = None
    pipe = child.process.stderr
    assert pipe is not None
    with pipe:
        for line in _lines(pipe.fileno(), keeper):
            if line.startswith(_ERROR_PREFIX):
                error = line.removeprefix(_ERROR_PREFIX)
            else:
                said = _LOGGER_NAME.sub("", line)
                logger.info("line %d: %s", wanted.line, said, extra=wanted.fields)
    return error


def _lines(fd: int, keeper: "Keeper") -> Iterator[str]:
    """Yield the lines that come through a pipe, until its end or until the service must end."""
    poll = select.poll()
    for each in (fd, keeper.wake_fd):
        poll.register(each, select.POLLIN)
    rest = b""
    while True:
        if keeper.wake_fd in {ready for ready, _ in poll.poll()}:
            keeper.stop()  # a signal makes it readable before the signal's handler has run
            return
        received = os.read(fd, 1 << 16)
        *lines, rest = (rest + received).split(b"\n")
        if not received and rest:
            lines.append(rest)
        for line in lines:
            yield line.decode(errors="replace")
        if not received:
            return


def _report_evicted(
    made: dict[str, ListedSource], latest: ListedSource, evicted: Collection[str]
) -> None:
    """Log which sources are not resident any more, and drop them from `made`.

    Args:
        made: the sources by their segments.
        latest: the source that was warmed last.
        evicted: the segments that were evicted for it.
    """
    lost = made.keys() - {info.name for info in segments()}
    by_source = {made.pop(name): name in evicted for name in sorted(lost, key=evicted.__contains__)}
    for each, is_evicted in sorted(by_source.items(), key=lambda item: item[0].line):
        if is_evicted:
            logger.error(
                "the list does not fit the budget: line %d, %s, was evicted for line %d",
                each.line,
                each.source,
                latest.line,
                extra=each.fields,
            )
        else:
            logger.warning(
                "line %d, %s, was removed meanwhile, by another load, a command or its keep-for",
                each.line,
                each.source,
                extra=each.fields,
            )
