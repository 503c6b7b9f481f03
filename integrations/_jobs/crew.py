"""The processes of a job, as the job sees them: a fork server and the runners it has forked.

Owns all of them. A runner that ends is replaced, and so is the fork server; who waits is told of
both. Where an error or an interrupt has left it unknown what was said last, all of them end, and
the next map starts anew.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from shmload._settings import settings
from shmload.errors import ArgumentError, JobFailed
from shmload.integrations._jobs.messages import (
    Begin,
    Ended,
    Fork,
    Forked,
    Prepared,
    Raised,
    Refused,
    Returned,
    Started,
    ToRunner,
    decode_from_runner,
    decode_from_server,
)
from shmload.integrations._jobs.payload import Payload, load
from shmload.integrations._jobs.runner_process import Event, RunnerProcess
from shmload.integrations._jobs.server_process import ServerProcess
from shmload.integrations.handles import Handle

# A wait that lasts so much longer than it was to: this process was stopped, by Ctrl-Z for instance.
_STOPPED_S = 5.0
# Of processes that end before they have worked, in a row.
_MAX_FAILED_STARTS = 3


class Crew:
    """A fork server and its runners. To be used by one thread at a time; any may close it.

    Args:
        handle: of the pipeline.
        devices: of the runners, one each.
        threads: of each, for torch.
        preload: modules that the fork server imports beside the libraries.

    Raises:
        JobFailed: no process can be started.
    """

    def __init__(
        self, handle: Handle, devices: Sequence[str], threads: int, preload: Sequence[str]
    ) -> None:
        self._handle = handle
        self.devices = devices
        self._threads = threads
        self._preload = tuple(preload)
        self._owner = os.getpid()
        self._lock = threading.RLock()  # by a handler of signals, it may be closed in the middle
        self._is_closed = False
        self._is_unsure = False
        """Whether something was begun and has not come to its end."""
        self._is_mapping = False
        """Whether there is something that `replace` is to end."""
        self._failed_starts = 0
        # Not epoll, of which a forked copy of this process would share the state.
        self._selector = selectors.PollSelector()
        self._server: ServerProcess | None = None
        self.runners: dict[int, RunnerProcess] = {}
        """By the number of their places; one may be missing while it is replaced."""
        self._begin: Begin | None = None
        self._start_server()

    def check(self) -> None:
        """See whether there is anything to be had here.

        Raises:
            ArgumentError: it was closed, or belongs to another process.
        """
        if not self._is_mine:
            raise ArgumentError(
                f"this job belongs to process {self._owner}, which was forked; make another one"
            )
        if self._is_closed:
            raise ArgumentError("this job is closed; make another one")

    def begin(self, begin: Begin) -> None:
        """Say what all runners work with from now on, those that come later too.

        `replace` is to be called when that is over.
        """
        with self._lock:
            if self._is_unsure or self._is_mapping:
                self._end_processes()
        with self._working():
            self._is_mapping = True
            self._begin = begin
            if not self._server:
                self._failed_starts = 0
                self._start_server()
            for runner in self.runners.values():
                if runner.is_started:
                    runner.post(begin)

    def wait(self, timeout_s: float) -> list[Event]:
        """Return what happens next; nothing if nothing does.

        Raises:
            ArgumentError: as `check`.
            JobFailed: processes keep ending before they have worked, or are not ready in time.
            ProtocolError: one of them has sent what is no message.
            Exception: the pipeline cannot be loaded, or not brought to its device.
        """
        with self._working():
            for runner in self.runners.values():
                runner.flush()
                if not runner.is_silent:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE * bool(runner.outbox))
                    self._selector.modify(runner.channel, wanted, runner)
            events: list[Event] = []
            until = time.monotonic() + timeout_s
            ready = self._selector.select(timeout_s)
            if (lost_s := time.monotonic() - until) > _STOPPED_S:
                self._make_up_for(lost_s)
            for key, mask in ready:
                events += self._take(key.data, mask)
            self._check_starts()
            self._check_ends()
            return events

    def post(self, runner: RunnerProcess, message: ToRunner) -> None:
        """Have a message go out to a runner.

        Raises:
            ArgumentError: as `check`.
        """
        with self._working():
            runner.post(message)

    def replace(self, runners: Iterable[RunnerProcess]) -> None:
        """Kill runners that do what nobody wants any more, and have others take their places."""
        if self._is_closed or not self._is_mine:
            return
        if self._is_unsure:
            with self._lock:
                self._end_processes()
            return
        with self._working():
            for runner in runners:
                runner.kill()
                self._drop(runner)
                self._fork(runner.number)
            self._is_mapping = False

    def close(self) -> None:
        """End all processes, and wait until they have; again is fine.

        In a forked copy of their owner it only lets go of them.
        """
        if not self._is_mine:
            self._forget()
            return
        self._is_closed = True  # before the lock is free: who waits ends with an error
        with self._lock:
            self._end_processes()
            self._selector.close()

    @property
    def _is_mine(self) -> bool:
        return os.getpid() == self._owner

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Do something from which a way out in the middle leaves all unsure."""
        self.check()  # in a forked child, whose parent's thread may have had the lock
        with self._lock:
            self.check()
            before, self._is_unsure = self._is_unsure, True
            yield
            self._is_unsure = before

    def _take(self, source: object, mask: int) -> Iterator[Event]:
        """Take what one process sends."""
        if isinstance(source, RunnerProcess):
            if self.runners.get(source.number) is source:  # it may just have been replaced
                if mask & selectors.EVENT_WRITE:
                    source.flush()
                if mask & selectors.EVENT_READ:
                    yield from self._hear(source)
        elif self._server and source is self._server:
            yield from self._hear_server(self._server)

    # The fork server ------------------------------------------------------------------------------

    def _start_server(self) -> None:
        server = ServerProcess(self._handle.text, self._threads, self._preload)
        self._server = server
        self._selector.register(server.channel, selectors.EVENT_READ, server)

    def _hear_server(self, server: ServerProcess) -> Iterator[Event]:
        is_there = server.inbox.receive()
        while (frame := server.inbox.next_frame()) is not None:
            match decode_from_server(frame):
                case Prepared():
                    server.is_prepared = True
                    for number in range(len(self.devices)):
                        self._fork(number)
                case Refused(error, traceback):
                    raise _unpickled(error, traceback)
                case Forked(number, pid):
                    pidfd = server.inbox.fds.pop(0)
                    runner = server.forked.pop(0)
                    runner.pid, runner.pidfd = pid, pidfd
                    if self.runners.get(number) is not runner:  # replaced before it was there
                        runner.kill()
                        runner.close()
                case Ended(pid) as ended:
                    yield from self._end(pid, ended)
        if not is_there:
            yield from self._replace_server(server)

    def _replace_server(self, server: ServerProcess) -> Iterator[Event]:
        """Start another one; the kernel has killed its runners with it."""
        self._server = None
        self._selector.unregister(server.channel)
        how = server.close()
        for runner in list(self.runners.values()):
            yield from self._finish(runner, Ended(runner.pid, how), is_innocent=True)
        for runner in server.forked:
            runner.close()
        self._count_failed_start(f"the fork server ended ({how})")
        self._start_server()

    def _end_processes(self) -> None:
        """End all of them, whatever state they are in."""
        self._selector.close()
        self._selector = selectors.PollSelector()
        server, self._server = self._server, None
        runners = [*self.runners.values(), *(server.forked if server else ())]
        self.runners.clear()
        self._is_unsure = self._is_mapping = False
        try:
            for runner in runners:
                runner.close()
        finally:
            if server:
                server.close()

    def _forget(self) -> None:
        """Let go of all, in a forked copy of their owner."""
        self._is_closed = True
        self._selector.close()
        for runner in [*self.runners.values(), *(self._server.forked if self._server else ())]:
            runner.close()
        if self._server:
            self._server.forget()

    # Runners --------------------------------------------------------------------------------------

    def _fork(self, number: int) -> None:
        server = self._server
        assert server
        assert server.is_prepared
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:
            raise JobFailed(f"a process of the job could not be started: {exc}") from exc
        ours.setblocking(False)
        with theirs:
            if not server.send(Fork(number, self.devices[number]), (theirs.fileno(),)):
                ours.close()  # its successor forks for every place
                return
        runner = RunnerProcess(number, ours)
        server.forked.append(runner)
        self.runners[number] = runner
        self._selector.register(ours, selectors.EVENT_READ, runner)

    def _hear(self, runner: RunnerProcess) -> Iterator[Event]:
        """Yield what a runner has said; that it has ended is heard from the fork server."""
        is_there = runner.receive()
        yield from self._answers(runner)
        if not is_there:
            self._silence(runner)

    def _silence(self, runner: RunnerProcess) -> None:
        """Listen to a runner no longer."""
        if not runner.is_silent:
            runner.is_silent = True
            runner.expect_end()
            self._selector.unregister(runner.channel)

    def _answers(self, runner: RunnerProcess) -> Iterator[Event]:
        while (frame := runner.inbox.next_frame()) is not None:
            message = decode_from_runner(frame)
            match message:
                case Started():
                    runner.is_started = True
                    if self._begin:
                        runner.post(self._begin)
                case Refused(error, traceback):
                    raise _unpickled(error, traceback)
                case Returned() | Raised():
                    self._failed_starts = 0
                    runner.item_s = runner.active_at - runner.since
            runner.since = runner.active_at
            if not isinstance(message, Refused):
                yield runner, message

    def _end(self, pid: int, ended: Ended) -> Iterator[Event]:
        """Take note of a runner's end, and have another take its place."""
        for runner in list(self.runners.values()):
            if runner.pid == pid:
                yield from self._finish(runner, ended, is_innocent=False)
                if not runner.is_started:
                    self._count_failed_start(f"a process ended before it could work ({ended.how})")
                self._fork(runner.number)
                return

    def _finish(self, runner: RunnerProcess, ended: Ended, *, is_innocent: bool) -> Iterator[Event]:
        """Hear a runner out, and say that it has ended."""
        with contextlib.suppress(BlockingIOError):
            while runner.inbox.receive():
                pass
        yield from self._answers(runner)
        self._drop(runner)
        if not is_innocent:
            runner.how = runner.how or ended.how
        yield runner, ended

    def _drop(self, runner: RunnerProcess) -> None:
        if self.runners.get(runner.number) is runner:
            del self.runners[runner.number]
            self._silence(runner)
        if self._server is None or runner not in self._server.forked:
            runner.close()  # else when it is there, to be killed

    # Deadlines ------------------------------------------------------------------------------------

    def _check_starts(self) -> None:
        """Look whether all have started in time, once it was heard what they say."""
        limit = settings().wait_timeout_s
        late = time.monotonic() - limit
        server = self._server
        if server and not server.is_prepared and server.since < late:
            raise JobFailed(
                f"the pipeline was not loaded within {limit:g} s; raise SHMLOAD_WAIT_TIMEOUT_S"
            )
        for runner in self.runners.values():
            if not runner.is_started and runner.since < late:
                raise JobFailed(
                    f"a process was not ready within {limit:g} s; raise SHMLOAD_WAIT_TIMEOUT_S"
                )

    def _make_up_for(self, lost_s: float) -> None:
        """Count a time for nobody: all were stopped together, or nobody could be heard."""
        if self._server:
            self._server.since += lost_s
        for runner in self.runners.values():
            runner.since += lost_s
            runner.active_at += lost_s
            runner.ending_since += lost_s

    def _check_ends(self) -> None:
        """Kill a fork server that does not say of a runner that it has ended.

        It was stopped, perhaps; or the kernel cannot end the runner, which waits for a dead disk.
        """
        late = time.monotonic() - settings().stall_timeout_s
        silent = [each for each in self.runners.values() if each.ending_since < late]
        for runner in silent:
            runner.kill(runner.how or "it has closed its socket")
        if self._server and silent:
            self._server.kill()

    def _count_failed_start(self, what: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == _MAX_FAILED_STARTS:
            raise JobFailed(f"{what}, {_MAX_FAILED_STARTS} times in a row; see what it has printed")


def _unpickled(error: Payload, traceback: str) -> BaseException:
    """Return an error that another process has met, with its traceback as a note."""
    found: BaseException = load(error)
    found.add_note(f"in a process of the job:\n{traceback}")
    return found
