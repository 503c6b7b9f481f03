"""The table of a job's processes: a fork server and one runner for each device.

A runner that ends is replaced, and so is the fork server; `wait` reports the ends of runners. After
an error or an interrupt it is unknown which messages were sent: all processes end, and the next map
starts others.

    starting ---> working ---> ending ---> replaced
        |            |            |
        +--- late ---+--- its end is reported by the fork server, or that ends itself
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from shmload._jobs.messages import (
    Answer,
    Begin,
    Ended,
    Fork,
    Forked,
    LoadFailed,
    Prepared,
    Started,
    ToRunner,
)
from shmload._jobs.payload import load
from shmload._jobs.processes import Runner, Server
from shmload._settings import settings
from shmload.errors import ArgumentError, JobFailed
from shmload.integrations.handles import Handle

# If a wait takes this much longer than asked, this process was stopped, by Ctrl-Z for instance.
_STOPPED_S = 5.0
# The job fails when this many processes in a row have ended before any work.
_MAX_FAILED_STARTS = 3

Event = tuple[Runner, Started | Answer | Ended]
"""What a runner has sent, or that it has ended."""


class Crew:
    """A fork server and its runners: for the process that made it, one thread at a time.

    Any thread may close it, and so may a signal handler in the middle of a use.

    Args:
        handle: of the pipeline.
        devices: of the runners, one each.
        threads: of each, for torch.
        preload: modules that the fork server imports beside the libraries.
        start: start the fork server now, or else at the first `begin_map`.

    Raises:
        JobFailed: no process can be started.
    """

    def __init__(
        self,
        handle: Handle,
        devices: Sequence[str],
        threads: int,
        preload: Sequence[str],
        *,
        start: bool = True,
    ) -> None:
        self.devices = devices
        self.runners: dict[int, Runner] = {}
        """By place, from 0. A place is missing while its runner is replaced."""
        self._handle = handle
        self._threads = threads
        self._preload = preload
        self._owner = os.getpid()
        # Not a Lock: a signal handler may close in the middle of a use.
        self._lock = threading.RLock()
        self._is_closed = False
        self._is_unsure = False
        """Whether an error or an interrupt has ended a use in the middle."""
        self._is_mapping = False
        """Whether `begin_map` was called and `end_map` was not yet."""
        self._begin: Begin | None = None
        self._failed_starts = 0
        self._server: Server | None = None
        """None while there are no processes: before the start, after an error or `close`."""
        self._asked: deque[Runner] = deque()
        """Asked for and not yet forked, in that order."""
        self._selector: selectors.BaseSelector
        if start:
            self._start()

    # Use ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an error if this crew cannot be used.

        Raises:
            ArgumentError: it was closed, or belongs to another process.
        """
        if os.getpid() != self._owner:
            raise ArgumentError(
                f"this job belongs to process {self._owner}, which was forked; make another one"
            )
        if self._is_closed:
            raise ArgumentError("this job is closed; make another one")

    def begin_map(self, begin: Begin) -> None:
        """Tell all runners, later ones too, what to work with; call `end_map` at the end.

        Raises:
            ArgumentError: as `check`.
            JobFailed: no process can be started.
        """
        with self._lock:
            if self._is_unsure or self._is_mapping:
                self._end()
        with self._use():
            self._is_mapping = True
            self._begin = begin
            if not self._server:
                self._failed_starts = 0
                self._start()
            for runner in self.runners.values():
                if runner.is_started:
                    runner.post(begin)

    def wait(self, timeout_s: float) -> list[Event]:
        """Return what happens next, or an empty list after a timeout.

        Raises:
            ArgumentError: as `check`.
            JobFailed: processes keep ending before they have worked, or are not ready in time.
            ProtocolError: a process has sent something that is no message.
            Exception: the pipeline cannot be loaded, or not brought to its device.
        """
        events: list[Event] = []
        with self._use():
            if not self._server:  # a signal handler has closed this
                return events
            for runner in self.runners.values():
                runner.flush()
                if not runner.is_silent:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE * bool(runner.outbox))
                    self._selector.modify(runner.channel, wanted, runner)
            begun = time.monotonic()
            ready = self._selector.select(timeout_s)
            if (lost_s := time.monotonic() - begun - timeout_s) > _STOPPED_S:
                self._extend(lost_s)
            for key, mask in ready:
                process = key.data
                if process is self._server:
                    self._hear_server(process, events)
                elif self._has(process):  # it may have been replaced
                    if mask & selectors.EVENT_WRITE:
                        process.flush()
                    if mask & selectors.EVENT_READ and not self._hear(process, events):
                        self._silence(process)
            if self._server:  # another one if that has ended; none after `close`
                self._check_deadlines(self._server)
        return events

    def post(self, runner: Runner, message: ToRunner) -> None:
        """Send a message to a runner as soon as it takes it.

        Raises:
            ArgumentError: as `check`.
        """
        with self._use():
            runner.post(message)

    def end_map(self, runners: Iterable[Runner]) -> None:
        """End a map: kill the runners that still work for it, and fork others in their places."""
        if self._is_closed or os.getpid() != self._owner:
            return
        if self._is_unsure:
            with self._lock:
                self._end()
            return
        with self._use():
            for runner in runners:
                runner.kill()
                self._drop(runner)
                self._fork(runner.place)
            self._is_mapping = False

    def close(self) -> None:
        """End all processes and wait until they have ended; a second call does nothing.

        In a forked copy of their owner it only closes the copy's descriptors.
        """
        self._is_closed = True  # before the lock is free: a waiting map ends with an error
        if os.getpid() == self._owner:
            with self._lock:
                self._end()
        elif server := self._forget_all():
            server.forget()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Hold the lock for a use; an exception in the block leaves `_is_unsure` set."""
        self.check()  # first: in a forked child the lock may be a copy that a thread held
        with self._lock:
            self.check()
            before, self._is_unsure = self._is_unsure, True
            yield
            self._is_unsure = before

    # Start and end --------------------------------------------------------------------------------

    def _start(self) -> None:
        self._server = Server(self._handle.text, self._threads, self._preload)
        # Not epoll: a forked copy of this process would share its state.
        self._selector = selectors.PollSelector()
        self._selector.register(self._server.channel, selectors.EVENT_READ, self._server)

    def _fork(self, place: int) -> None:
        """Ask for a runner; `_identify` is called when it is there.

        If the server does not take the message, it has ended; the next server forks a runner for
        every place.
        """
        if not self._server:  # a signal handler has closed this
            return
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:
            raise JobFailed(f"a process of the job could not be started: {exc}") from exc
        ours.setblocking(False)
        with theirs:
            if not self._server.send(Fork(place, self.devices[place]), (theirs.fileno(),)):
                ours.close()
                return
        runner = Runner(place, ours)
        self._asked.append(runner)
        self.runners[place] = runner
        self._selector.register(ours, selectors.EVENT_READ, runner)

    def _identify(self, server: Server, pid: int) -> None:
        """Set the pid, and the pidfd that has just come, of the runner that was asked for first."""
        runner = self._asked.popleft()
        runner.pid, runner.pidfd = pid, server.inbox.fds.pop(0)
        if not self._has(runner):  # dropped before it was forked
            runner.kill()
            runner.close()

    def _has(self, runner: Runner) -> bool:
        return self.runners.get(runner.place) is runner

    def _silence(self, runner: Runner) -> None:
        """Listen to a runner no longer: its end must follow."""
        if self._server and not runner.is_silent:
            runner.is_silent = True
            runner.expect_end()
            self._selector.unregister(runner.channel)

    def _drop(self, runner: Runner) -> None:
        """Free the place of a runner that has ended or was killed."""
        if self._has(runner):
            del self.runners[runner.place]
            self._silence(runner)
        runner.close()

    def _forget_all(self) -> Server | None:
        """Empty the table, close all descriptors of runners, and return the server."""
        server, self._server = self._server, None
        if server:
            self._selector.close()
            for runner in (*self.runners.values(), *self._asked):
                runner.close()
            self.runners.clear()
            self._asked.clear()
        return server

    def _end(self) -> None:
        """End all processes, whatever state they are in; the crew's state is known again."""
        self._is_unsure = self._is_mapping = False
        if server := self._forget_all():
            server.close()

    # What they say --------------------------------------------------------------------------------

    def _hear_server(self, server: Server, events: list[Event]) -> None:
        """Do what the fork server's messages ask for."""
        is_open = server.inbox.receive()
        for message in server.messages():
            match message:
                case Prepared():
                    for place in range(len(self.devices)):
                        self._fork(place)
                case LoadFailed():
                    raise _met(message)
                case Forked(pid):
                    self._identify(server, pid)
                case Ended(pid):
                    for runner in list(self.runners.values()):
                        if runner.pid == pid:
                            self._replace_ended(runner, message, events)
        if not is_open:
            self._restart(server, events)

    def _hear(self, runner: Runner, events: list[Event], *, is_last: bool = False) -> bool:
        """Take what a runner has sent, all of it at its end; False at the end of file."""
        is_open = runner.receive(is_last=is_last)
        for message in runner.messages():
            match message:
                case Started() if self._begin:
                    runner.post(self._begin)
                case LoadFailed():
                    raise _met(message)
                case Answer():
                    self._failed_starts = 0
            events.append((runner, message))
        return is_open

    def _replace_ended(self, runner: Runner, ended: Ended, events: list[Event]) -> None:
        """Fork another runner in the place of one that has ended."""
        self._hear(runner, events, is_last=True)
        self._drop(runner)
        runner.how = runner.how or ended.how
        events.append((runner, ended))
        if not runner.is_started:
            self._count_failed_start(f"a process ended before it could work ({ended.how})")
        self._fork(runner.place)

    def _restart(self, server: Server, events: list[Event]) -> None:
        """Start another fork server; the kernel has killed the runners of the one that ended."""
        how = server.close()
        for runner in list(self.runners.values()):
            self._hear(runner, events, is_last=True)
            events.append((runner, Ended(runner.pid, how)))  # its item is not to blame
        self._forget_all()
        self._count_failed_start(f"the fork server ended ({how})")
        self._start()

    def _count_failed_start(self, what: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == _MAX_FAILED_STARTS:
            raise JobFailed(f"{what}, {_MAX_FAILED_STARTS} times in a row; see what it has printed")

    # Deadlines ------------------------------------------------------------------------------------

    def _check_deadlines(self, server: Server) -> None:
        """Raise an error if a process has not started in time. Call this once messages are read.

        Kill a fork server that does not report a runner's end in time. It may have been stopped; or
        the kernel cannot end the runner, which waits for a dead disk.
        """
        limit, now = settings().wait_timeout_s, time.monotonic()
        if not server.is_prepared and server.since < now - limit:
            raise JobFailed(
                f"the pipeline was not loaded within {limit:g} s; raise SHMLOAD_WAIT_TIMEOUT_S"
            )
        for runner in self.runners.values():
            if not runner.is_started and runner.since < now - limit:
                raise JobFailed(
                    f"a process was not ready within {limit:g} s; raise SHMLOAD_WAIT_TIMEOUT_S"
                )
            if runner.ending_since < now - settings().stall_timeout_s:
                runner.kill(runner.how or "it has closed its socket")
                server.kill()

    def _extend(self, lost_s: float) -> None:
        """Extend every deadline by the time that this process was stopped."""
        if self._server:
            self._server.since += lost_s
        for runner in self.runners.values():
            runner.since += lost_s
            runner.active_at += lost_s
            runner.ending_since += lost_s


def _met(failure: LoadFailed) -> BaseException:
    """Return an error that another process has met, with its traceback as a note."""
    found: BaseException = load(failure.error)
    found.add_note(f"in a process of the job:\n{failure.traceback}")
    return found
