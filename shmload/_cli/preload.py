"""Preloading: the service warms the sources of a list at its start, one after the other."""

import os
import re
import select
import subprocess
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from shmload._cli.preload_list import ListedSource
from shmload._ipc.child import Child, child_environment
from shmload._segments.listing import segments
from shmload._wording import format_nbytes, logger_of

if TYPE_CHECKING:
    from shmload._service.state import ServiceState

logger = logger_of(__name__)

_LOGGER_NAME = re.compile(r"^shmload[\w.]*: ")  # at the beginning of a line that a child logs
_END_TIMEOUT_S = 5.0  # after which a child that was asked to end is killed
_ERROR_PREFIX = "shmload: "  # as the command line prints the errors of this package


class _Evicted(msgspec.Struct, frozen=True):
    """What went for a source; see `shmload.Evicted`."""

    segments: tuple[str, ...]


class _Report(msgspec.Struct, frozen=True):
    """What `shmload warm --json` says of a source; see `shmload.WarmReport`."""

    segments: tuple[str, ...]
    resident_nbytes: int
    evicted: tuple[_Evicted, ...] = ()


class _Answer(msgspec.Struct, frozen=True):
    """What `shmload warm --json` prints."""

    reports: tuple[_Report]


def preload(wanted: Sequence[ListedSource], state: "ServiceState") -> None:
    """Warm sources one after the other; log errors and go on with the next source.

    A child process warms each source as a client of this service, so the service never imports
    torch or the model libraries. Returns early when the service ends.
    """
    made: dict[str, ListedSource] = {}
    for each in wanted:
        if state.is_stopping:
            return
        state.preloading.begin(each.source)
        report = _warm(each, state)
        state.preloading.end(is_resident=report is not None)
        if report:
            logger.info(
                "preloaded %s: %s",
                each.source,
                format_nbytes(report.resident_nbytes),
                extra=each.fields | {"nbytes": report.resident_nbytes},
            )
            made.update(dict.fromkeys(report.segments, each))
            _report_evicted(made, each, {name for gone in report.evicted for name in gone.segments})


def _warm(wanted: ListedSource, state: "ServiceState") -> _Report | None:
    """Warm one source; None if that failed, which is logged, or if the service ends."""
    with open(os.memfd_create("shmload-preload", os.MFD_CLOEXEC), "rb") as output:
        try:
            child = Child(
                "shmload",
                ["--verbose", "warm", "--json", "--quiet", *wanted.options(), "--", wanted.source],
                env=child_environment() | {"SHMLOAD_SERVICE": "require"},
                stdout=output.fileno(),
                stderr=subprocess.PIPE,
            )
        except OSError as exc:
            logger.error(
                "line %d cannot be preloaded: no process for it: %s",
                wanted.line,
                exc,
                extra=wanted.fields,
            )
            return None
        try:
            error = _log_lines(child, wanted, state)
        finally:
            how = child.end(_END_TIMEOUT_S, ask=state.is_stopping)
        if child.process.returncode == 0:
            output.seek(0)  # the offset is the child's too
            return _read_report(output.read(), wanted)
    if not state.is_stopping:
        reason = error or f"its process ended ({how})"
        logger.error("line %d cannot be preloaded: %s", wanted.line, reason, extra=wanted.fields)
    return None


def _read_report(output: bytes, wanted: ListedSource) -> _Report | None:
    """Read what the child printed; None, which is logged, if it is not a report.

    Libraries may print before it: the answer begins at the last line that begins with `{`.
    """
    try:
        return msgspec.json.decode(output[output.rfind(b"\n{") + 1 :], type=_Answer).reports[0]
    except msgspec.MsgspecError as exc:
        logger.error(
            "line %d: its process printed no report: %s", wanted.line, exc, extra=wanted.fields
        )
        return None


def _log_lines(child: Child, wanted: ListedSource, state: "ServiceState") -> str | None:
    """Log what a child logs, until it or the service ends; returns its error."""
    error = None
    pipe = child.process.stderr
    assert pipe is not None
    with pipe:
        for line in _lines(pipe.fileno(), state.wake_fd):
            if line.startswith(_ERROR_PREFIX):
                error = line.removeprefix(_ERROR_PREFIX)
            else:
                said = _LOGGER_NAME.sub("", line)
                logger.info("line %d: %s", wanted.line, said, extra=wanted.fields)
    return error


def _lines(fd: int, wake_fd: int) -> Iterator[str]:
    """Yield the lines that come through a pipe, until its end or until `wake_fd` is readable."""
    poll = select.poll()
    for each in (fd, wake_fd):
        poll.register(each, select.POLLIN)
    rest = b""
    while wake_fd not in {ready for ready, _ in poll.poll()}:
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
