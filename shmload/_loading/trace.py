"""Where the time of a load goes: the one way in which its phases are measured.

A thread's time is cut into spans, one after the other: to enter a phase ends the span of the
phase around it. So phases are disjoint, and those of the caller's thread add up to the time of the
call. While the caller waits for the load's own thread, its time counts for what that thread does.

With a path the spans are written as a Chrome trace, which https://ui.perfetto.dev opens: a track
for each thread and each worker. A load that fails writes its trace too.
"""

import contextlib
import enum
import functools
import os
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from shmload._host.descriptors import close, wait_lock
from shmload._settings import settings
from shmload._wording import logger_of, printing
from shmload.errors import ArgumentError

logger = logger_of(__name__)

_END = b"\n]\n"


class Phase(enum.StrEnum):
    """What a thread of a load does; the value is what reports and traces call it."""

    FIND = "find"
    PLAN = "plan"
    IMPORT = "import"
    MAKE_ROOM = "make room"
    WAIT = "wait for another"
    READ = "read and cast"
    BUILD = "build"
    RECALL = "recall"
    REMEMBER = "remember"
    COPY = "copy to devices"
    REST = "rest"
    AWAIT = "wait for the load"
    """Another thread waits for the load's own; sums count what that one does meanwhile."""


class _Span(NamedTuple):
    begin: float
    end: float
    phase: Phase
    what: str = ""


class _Track:
    """What a thread does, one after the other, from now on."""

    def __init__(self, trace: "Trace", name: str) -> None:
        self.trace = trace
        self.name = name
        self.spans = list[_Span]()
        self.phases = [(Phase.REST, "")]
        self._since = time.monotonic()

    def cut(self) -> None:
        """End the span of the current phase; the next one begins at the same moment."""
        begin, self._since = self._since, time.monotonic()
        self.spans.append(_Span(begin, self._since, *self.phases[-1]))


_current: ContextVar[_Track | None] = ContextVar("shmload-track", default=None)


class Trace:
    """The tracks of one call, which begins now.

    Args:
        title: what the log and the file call it.
    """

    def __init__(self, title: str) -> None:
        self.title = printing(title)
        self.caller = _Track(self, "caller")
        self._threads = {threading.get_native_id(): self.caller}
        self._workers = dict[int, list[_Span]]()  # by the id of the process

    @contextlib.contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Measure another thread of the load, which calls this, on a track of its own."""
        track = self._threads[threading.get_native_id()] = _Track(self, name)
        token = _current.set(track)
        try:
            yield
        finally:
            track.cut()
            _current.reset(token)

    def note_piece(self, worker: int, begin: float, what: str) -> None:
        """Note what a worker has read and cast until now.

        Args:
            worker: id of its process.
            begin: the monotonic time at which it began with the piece, in seconds.
            what: the piece's file.
        """
        spans = self._workers.setdefault(worker, [])
        spans.append(_Span(begin, time.monotonic(), Phase.READ, what))

    def times_s(self) -> dict[str, float]:
        """Return the time of each phase so far, in seconds; together that of the call."""
        self.caller.cut()
        others = [track for track in self._threads.values() if track is not self.caller]
        meanwhile = sorted(span for track in others for span in track.spans)
        times = {phase.value: 0.0 for phase in Phase if phase is not Phase.AWAIT}
        for begin, end, phase, _ in self.caller.spans:
            if phase is not Phase.AWAIT:
                times[phase] += end - begin
                continue
            for other in meanwhile:
                low, high = max(begin, other.begin), min(end, other.end)
                if low < high:
                    times[Phase.REST] += low - begin
                    times[other.phase] += high - low
                    begin = high
            times[Phase.REST] += end - begin
        return times

    def save(self, fd: int, kind: type[BaseException] | None, *_: object) -> None:
        """Add the trace to an open file, and close it; an error of that is none of the load.

        Args:
            fd: of a file that is empty, or ends as a trace does.
            kind: of the error that ended the call; None if none did.
        """
        import json  # a load without a file needs none of it

        events = b",\n".join(json.dumps(event).encode() for event in self._events(kind))
        try:
            # Another process that loads writes its events within milliseconds.
            if not wait_lock(fd, exclusive=True, timeout_s=10):
                raise TimeoutError("another process holds its lock")
            nbytes = os.fstat(fd).st_size
            # Over the end of the events that are there.
            content = (b",\n" if nbytes else b"[\n") + events + _END
            os.pwrite(fd, content, max(0, nbytes - len(_END)))
        except OSError as exc:
            logger.warning("%s: the trace is not written: %s", self.title, exc)
        close(fd)

    def _events(self, kind: type[BaseException] | None) -> Iterator[dict[str, Any]]:
        """Yield the events, as Chrome's format has them; times in microseconds."""
        sums = {**self.times_s(), **({"error": kind.__name__} if kind else {})}
        tracks = {tid: (each.name, each.spans) for tid, each in self._threads.items()}
        tracks |= {tid: (f"worker {tid}", each) for tid, each in self._workers.items()}
        begin, end = self.caller.spans[0].begin, self.caller.spans[-1].end
        at = {"cat": "shmload", "pid": os.getpid(), "tid": next(iter(self._threads))}
        yield _event(self.title, begin, end, sums) | at
        for tid, (name, spans) in tracks.items():
            at = at | {"tid": tid}
            yield {"ph": "M", "name": "thread_name", "args": {"name": name}} | at
            for begin, end, phase, what in spans:
                yield _event(phase, begin, end, {"what": what} if what else {}) | at


def _event(name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    ts, dur = round(begin * 1e6), round((end - begin) * 1e6)
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "args": args}


@contextlib.contextmanager
def during(phase: Phase, what: str = "") -> Iterator[None]:
    """Count a block's time for a phase, if this thread is in a load; blocks within it do not count.

    Args:
        phase: the phase.
        what: more about it, such as the devices of a copy.
    """
    track = _current.get()
    if track is None:
        yield
        return
    track.cut()
    track.phases.append((phase, what))
    try:
        yield
    finally:
        track.cut()
        track.phases.pop()


def current() -> Trace | None:
    """Return the trace that this thread's load is measured by; None outside of one."""
    track = _current.get()
    return track.trace if track else None


@contextlib.contextmanager
def tracing(path: str | os.PathLike[str] | None, title: str) -> Iterator[Trace]:
    """Measure a call; a call within another is part of it.

    Args:
        path: of the file that the trace is added to; None for `SHMLOAD_TRACE`, or else for none.
        title: of the call.

    Raises:
        ArgumentError: the file cannot be written, or is no trace.
    """
    outer = current()
    if outer is not None:
        yield outer
        return
    path = settings().trace if path is None else path
    with contextlib.ExitStack() as ending:
        fd = None if path is None else _open(path)
        trace = Trace(title)
        if fd is not None:
            ending.push(functools.partial(trace.save, fd))
        ending.callback(_current.reset, _current.set(trace.caller))
        yield trace
        logger.info("%s: loaded: %s", title, describe_times(trace.times_s()))


def _open(path: str | os.PathLike[str]) -> int:
    """Open the file of a trace, so that an error comes before the load.

    Raises:
        ArgumentError: it cannot be written, or is no trace.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        nbytes = os.fstat(fd).st_size  # 0 of a pipe, which cannot be read at a place
        end = os.pread(fd, len(_END), max(0, nbytes - len(_END))) if nbytes else b""
    except OSError as exc:
        raise ArgumentError(f"trace: {path} cannot be written: {exc.strerror}") from exc
    if end not in (b"", _END):
        os.close(fd)
        raise ArgumentError(f"trace: {path} is a file of another kind; give a new name")
    return fd


def describe_times(times_s: dict[str, float]) -> str:
    """Write the time of each phase that took a tenth of a second or more; may be empty."""
    return ", ".join(f"{phase} {each:.1f} s" for phase, each in times_s.items() if each >= 0.1)
