"""The processes of a job, as the job uses them: a fork server and one runner for each device.

A runner that ends is replaced, and so is the fork server; `wait` reports the ends of runners. After
an error or an interrupt it is unknown which messages were sent: all processes end, and the next map
starts others.
"""

import selectors
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shmload.errors import JobFailed
from shmload.integrations._jobs.access import Access
from shmload.integrations._jobs.deadlines import check_ends, check_starts, extend
from shmload.integrations._jobs.messages import (
    Begin,
    Ended,
    Forked,
    LoadFailed,
    Prepared,
    Raised,
    Returned,
    Started,
    ToRunner,
)
from shmload.integrations._jobs.payload import Payload, load
from shmload.integrations._jobs.processes import Processes
from shmload.integrations._jobs.runner_process import Event, RunnerProcess
from shmload.integrations._jobs.server_process import ServerProcess
from shmload.integrations.handles import Handle

# If a wait takes this much longer than asked, this process was stopped, by Ctrl-Z for instance.
_STOPPED_S = 5.0
# The job fails when this many processes in a row have ended before any work.
_MAX_FAILED_STARTS = 3


class Crew:
    """A fork server and its runners. One thread at a time may use it; any may close it.

    Args:
        handle: of the pipeline.
        devices: of the runners, one each.
        threads: of each, for torch.
        preload: modules that the fork server imports beside the libraries.
        start: start the fork server now, or else at the first `begin`.

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
        self._handle = handle
        self._threads = threads
        self._preload = tuple(preload)
        self._access = Access()
        self._is_mapping = False
        """Whether `begin` was called and `replace` was not yet."""
        self._begin: Begin | None = None
        self._failed_starts = 0
        self._processes: Processes | None = None
        """None while there are none: before the start, after an error, an interrupt or `close`."""
        if start:
            self._start()

    @property
    def runners(self) -> Mapping[int, RunnerProcess]:
        """The runners by place; a place is missing while its runner is replaced."""
        return self._processes.runners if self._processes else {}

    def check(self) -> None:
        """Raise an error if this crew cannot be used.

        Raises:
            ArgumentError: it was closed, or belongs to another process.
        """
        self._access.check()

    def begin(self, begin: Begin) -> None:
        """Tell all runners, later ones too, what to work with; call `replace` at the end.

        Raises:
            ArgumentError: as `check`.
            JobFailed: no process can be started.
        """
        with self._access.lock:
            if self._access.is_unsure or self._is_mapping:
                self._end_processes()
        with self._access.use():
            self._is_mapping = True
            self._begin = begin
            if not self._processes:
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
        with self._access.use():
            processes = self._processes
            if not processes:  # a signal handler has closed this
                return []
            processes.flush()
            begun = time.monotonic()
            ready = processes.wait(timeout_s)
            if (lost_s := time.monotonic() - begun - timeout_s) > _STOPPED_S:
                extend(processes, lost_s)
            events: list[Event] = []
            for process, mask in ready:
                events += self._take(process, mask)
            if self._processes:  # others now if the fork server has ended; none after `close`
                check_starts(self._processes)
                check_ends(self._processes)
            return events

    def post(self, runner: RunnerProcess, message: ToRunner) -> None:
        """Send a message to a runner as soon as it takes it.

        Raises:
            ArgumentError: as `check`.
        """
        with self._access.use():
            runner.post(message)

    def replace(self, runners: Iterable[RunnerProcess]) -> None:
        """End a map: kill the runners that still work for it, and fork others in their places."""
        if self._access.is_closed or not self._access.is_mine:
            return
        if self._access.is_unsure:
            with self._access.lock:
                self._end_processes()
            return
        with self._access.use():
            for runner in runners:
                assert self._processes
                runner.kill()
                self._processes.drop(runner)
                self._fork(self._processes, runner.place)
            self._is_mapping = False

    def close(self) -> None:
        """End all processes and wait until they have ended; a second call does nothing.

        In a forked copy of their owner it only closes the copy's descriptors.
        """
        self._access.close()  # before the lock is free: a waiting map ends with an error
        if not self._access.is_mine:
            if self._processes:
                self._processes.forget()
            return
        with self._access.lock:
            self._end_processes()

    def _start(self) -> None:
        self._processes = Processes(ServerProcess(self._handle.text, self._threads, self._preload))

    def _fork(self, processes: Processes, place: int) -> None:
        processes.fork(place, self.devices[place])

    def _end_processes(self) -> None:
        """End all processes, whatever state they are in; the crew's state is known again."""
        processes, self._processes = self._processes, None
        self._access.is_unsure = self._is_mapping = False
        if processes:
            processes.close()

    def _take(self, process: ServerProcess | RunnerProcess, mask: int) -> Iterator[Event]:
        """Yield what the messages of one process mean; nothing if it was replaced."""
        processes = self._processes
        if not processes:
            return
        if isinstance(process, ServerProcess):
            if process is processes.server:
                yield from self._hear_server(processes)
        elif processes.has(process):
            if mask & selectors.EVENT_WRITE:
                process.flush()
            if mask & selectors.EVENT_READ:
                yield from self._hear_runner(processes, process)

    def _hear_server(self, processes: Processes) -> Iterator[Event]:
        """Do what the fork server's messages ask for; yield what they mean for runners."""
        server = processes.server
        is_open = server.inbox.receive()
        for message in server.messages():
            match message:
                case Prepared():
                    for place in range(len(self.devices)):
                        self._fork(processes, place)
                case LoadFailed(error, traceback):
                    raise _unpickled(error, traceback)
                case Forked(pid):
                    processes.identify(pid)
                case Ended(pid) as ended:
                    yield from self._replace_ended(processes, pid, ended)
        if not is_open:
            yield from self._restart(processes)

    def _hear_runner(self, processes: Processes, runner: RunnerProcess) -> Iterator[Event]:
        """Yield what a runner has sent; the fork server reports its end."""
        is_open = runner.receive()
        yield from self._answers(runner)
        if not is_open:
            processes.silence(runner)

    def _answers(self, runner: RunnerProcess) -> Iterator[Event]:
        for message in runner.messages():
            match message:
                case Started():
                    if self._begin:
                        runner.post(self._begin)
                case LoadFailed(error, traceback):
                    raise _unpickled(error, traceback)
                case Returned() | Raised():
                    self._failed_starts = 0
            yield runner, message

    def _replace_ended(self, processes: Processes, pid: int, ended: Ended) -> Iterator[Event]:
        """Yield what a runner sent before it ended, and its end; fork another in its place."""
        for runner in list(processes.runners.values()):
            if runner.pid == pid:
                yield from self._finish(processes, runner, ended, is_innocent=False)
                if not runner.is_started:
                    self._count_failed_start(f"a process ended before it could work ({ended.how})")
                self._fork(processes, runner.place)
                return

    def _restart(self, processes: Processes) -> Iterator[Event]:
        """Start another fork server; the kernel has killed the runners of the one that ended."""
        how = processes.server.close()
        for runner in list(processes.runners.values()):
            ended = Ended(runner.pid, how)
            yield from self._finish(processes, runner, ended, is_innocent=True)
        self._processes = None
        processes.close()
        self._count_failed_start(f"the fork server ended ({how})")
        self._start()

    def _finish(
        self, processes: Processes, runner: RunnerProcess, ended: Ended, *, is_innocent: bool
    ) -> Iterator[Event]:
        """Yield what a runner sent before it ended, then its end.

        Args:
            processes: the crew's processes, the runner among them.
            runner: the runner.
            ended: how it ended.
            is_innocent: whether its item is not to blame.
        """
        runner.receive_rest()
        yield from self._answers(runner)
        processes.drop(runner)
        if not is_innocent:
            runner.how = runner.how or ended.how
        yield runner, ended

    def _count_failed_start(self, what: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == _MAX_FAILED_STARTS:
            raise JobFailed(f"{what}, {_MAX_FAILED_STARTS} times in a row; see what it has printed")


def _unpickled(error: Payload, traceback: str) -> BaseException:
    """Return an error that another process has met, with its traceback as a note."""
    found: BaseException = load(error)
    found.add_note(f"in a process of the job:\n{traceback}")
    return found
