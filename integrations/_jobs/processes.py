"""A fork server with the runners that it has forked: what is there, and what can be read now."""

import selectors
import socket
from collections import deque

from shmload.errors import JobFailed
from shmload.integrations._jobs.messages import Fork
from shmload.integrations._jobs.runner_process import RunnerProcess
from shmload.integrations._jobs.server_process import ServerProcess


class Processes:
    """A fork server and its runners. They end together: the kernel kills runners with their server.

    Owns all of them.

    Args:
        server: just started; it has no runner yet.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.runners: dict[int, RunnerProcess] = {}
        """By place, from 0. A place is missing while its runner is replaced."""
        self._asked: deque[RunnerProcess] = deque()
        """Asked for and not yet forked, in that order."""
        # Not epoll: a forked copy of this process would share its state.
        self._selector = selectors.PollSelector()
        self._selector.register(server.channel, selectors.EVENT_READ, server)

    def flush(self) -> None:
        """Send each runner what it takes now, and listen for room where something is left."""
        for runner in self.runners.values():
            runner.flush()
            if not runner.is_silent:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE * bool(runner.outbox))
                self._selector.modify(runner.channel, wanted, runner)

    def wait(self, timeout_s: float) -> list[tuple[ServerProcess | RunnerProcess, int]]:
        """Return the processes that can be read or take more, each with its event mask."""
        return [(key.data, mask) for key, mask in self._selector.select(timeout_s)]

    def fork(self, place: int, device: str) -> None:
        """Ask for a runner; `identify` is called when it is there.

        If the server does not take the message, it has ended; the next server forks a runner for
        every place.

        Raises:
            JobFailed: this process has no descriptors to spare.
        """
        assert self.server.is_prepared
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:
            raise JobFailed(f"a process of the job could not be started: {exc}") from exc
        ours.setblocking(False)
        with theirs:
            if not self.server.send(Fork(place, device), (theirs.fileno(),)):
                ours.close()
                return
        runner = RunnerProcess(place, ours)
        self._asked.append(runner)
        self.runners[place] = runner
        self._selector.register(ours, selectors.EVENT_READ, runner)

    def identify(self, pid: int) -> None:
        """Set the pid, and the pidfd that has just come, of the runner that was asked for first."""
        runner = self._asked.popleft()
        runner.pid, runner.pidfd = pid, self.server.inbox.fds.pop(0)
        if not self.has(runner):  # dropped before it was forked
            runner.kill()
            runner.close()

    def has(self, runner: RunnerProcess) -> bool:
        """Tell whether a runner still has its place: it may have been dropped."""
        return self.runners.get(runner.place) is runner

    def silence(self, runner: RunnerProcess) -> None:
        """Listen to a runner no longer: its end must follow."""
        if not runner.is_silent:
            runner.is_silent = True
            runner.expect_end()
            self._selector.unregister(runner.channel)

    def drop(self, runner: RunnerProcess) -> None:
        """Free the place of a runner that has ended or was killed."""
        if self.has(runner):
            del self.runners[runner.place]
            self.silence(runner)
        if runner not in self._asked:
            runner.close()  # else `identify` kills and closes it

    def close(self) -> str:
        """End all of them, wait until they have ended, and return how the server did."""
        self._selector.close()
        runners = self._all_runners()
        self.runners.clear()
        try:
            for runner in runners:
                runner.close()
        finally:
            how = self.server.close()
        return how

    def forget(self) -> None:
        """Close the descriptors in a forked copy of the owner; the processes go on."""
        self._selector.close()
        for runner in self._all_runners():
            runner.close()
        self.server.forget()

    def _all_runners(self) -> list[RunnerProcess]:
        return [*self.runners.values(), *self._asked]
