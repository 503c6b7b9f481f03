"""The fork server of a job: `python -P -m shmload._jobs.forkserver CHANNEL PARENT`.

Started with a Unix socket as descriptor CHANNEL and the job's process id. It imports the libraries
and builds the pipeline once, without CUDA, and forks a runner whenever it is asked for one. A
runner has all of that from its first moment, and shares the memory pages.

Forking a process that has imported torch is safe only while it has one thread: in the child no
other thread exists, and its locks would never be released. With more threads it refuses to serve.

Guarantee: neither it nor a runner outlives the job. It ends at the socket's end of file when the
job closes, and by the pidfd of the job's process when that was killed; the kernel kills runners
with the fork server.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from shmload._ipc.frames import Inbox, send, serve_parent
from shmload._ipc.procs import die_with_parent, how_it_ended
from shmload._jobs.messages import (
    Ended,
    Fork,
    Forked,
    LoadFailed,
    Prepared,
    Setup,
    decode_to_server,
)
from shmload._jobs.payload import dump_error, format_traceback
from shmload.errors import JobFailed, ProtocolError
from shmload.integrations.handles import Handle

_ENDING = (signal.SIGTERM, signal.SIGHUP)
# Joined threads stay in /proc/self/task briefly; wait this long.
_THREADS_TIMEOUT_S = 5.0


def main() -> None:
    """Serve one job until it is gone."""
    # A terminal or a service manager sends these to the whole process group; the job's process
    # decides what they mean. The job has blocked SIGINT; its program may have blocked others, or
    # ignored SIGCHLD, and children inherit both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # while it is still blocked
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def serve(channel: socket.socket, parent_fd: int) -> None:
        server = _ForkServer(channel, parent_fd, before)
        try:
            server.serve()
        finally:
            server.close()

    serve_parent(serve)


class _ForkServer:
    """Owns the runners: forks them, reaps them, and kills them when it ends."""

    def __init__(
        self, channel: socket.socket, parent_fd: int, handlers: dict[signal.Signals, Any]
    ) -> None:
        self._channel = channel
        self._parent_fd = parent_fd
        self._handlers = handlers
        self._inbox = Inbox(channel)
        self._setup: Setup | None = None
        self._runners: dict[int, int] = {}
        """Process id by pidfd."""
        self._poll = select.poll()
        for fd in (channel.fileno(), parent_fd):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Do what the messages ask for, until the job is gone."""
        while True:
            while (frame := self._inbox.next_frame()) is not None:
                match decode_to_server(frame):
                    case Setup() as setup:
                        self._prepare(setup)
                    case Fork() as fork:
                        self._fork(fork)
            ready = {fd for fd, _ in self._poll.poll()}
            for fd in ready.intersection(self._runners):
                self._reap(fd)
            if self._parent_fd in ready:
                return
            if self._channel.fileno() in ready and not self._inbox.receive():
                return

    def close(self) -> None:
        """Kill the runners and wait until they have ended."""
        for fd in self._runners:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        for fd, pid in self._runners.items():
            os.waitpid(pid, 0)
            os.close(fd)
        self._runners.clear()

    def _prepare(self, setup: Setup) -> None:
        """Import the libraries and build the pipeline."""
        self._setup = setup
        sys.path[:] = map(os.fsdecode, setup.path)
        tqdm.monitor_interval = 0  # even a disabled bar would start a thread
        try:
            with self._ending_with_the_job():
                Handle.from_text(setup.handle).load()
                for module in setup.preload:
                    importlib.import_module(module)
            _require_one_thread()
        except Exception as exc:  # the outermost loop: the job must learn of any error
            send(self._channel, LoadFailed(dump_error(exc), format_traceback()))
        else:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                    stream.flush()  # or each runner would print again what modules have printed
            gc.freeze()  # or a collection in a runner would copy every page that it visits
            send(self._channel, Prepared())

    @contextlib.contextmanager
    def _ending_with_the_job(self) -> Iterator[None]:
        """If the job ends during a long block, raise SystemExit in it.

        The job sends nothing until the block is done, so any event on its socket is its end.
        """
        before = signal.signal(signal.SIGIO, _leave)
        flags = fcntl.fcntl(self._channel, fcntl.F_GETFL)
        fcntl.fcntl(self._channel, fcntl.F_SETOWN, os.getpid())
        try:
            fcntl.fcntl(self._channel, fcntl.F_SETFL, flags | os.O_ASYNC)
            if self._poll.poll(0):
                sys.exit(0)
            yield
        finally:
            fcntl.fcntl(self._channel, fcntl.F_SETFL, flags)
            signal.signal(signal.SIGIO, before)

    def _fork(self, fork: Fork) -> None:
        if not self._inbox.fds or not self._setup:
            raise ProtocolError("a runner was asked for without its socket, or before the set-up")
        from shmload._jobs.runner import run  # with it, torch

        server, theirs = os.getpid(), self._inbox.fds.pop(0)
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                if os.getppid() == server:
                    self._leave_to_server()
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        run(theirs, fork, self._setup)  # until the job is gone
                    os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # in any case: a child must not run the fork server's clean-up
        os.close(theirs)
        fd = os.pidfd_open(pid)
        self._runners[fd] = pid
        self._poll.register(fd, select.POLLIN)
        send(self._channel, Forked(pid), (fd,))

    def _leave_to_server(self) -> None:
        """Give up, in a runner, what belongs to the fork server and to other runners."""
        for number, handler in self._handlers.items():  # processes that a function starts inherit
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was set by a C library
        self._channel.close()
        for fd in (self._parent_fd, *self._runners):
            os.close(fd)

    def _reap(self, fd: int) -> None:
        self._poll.unregister(fd)
        os.close(fd)
        pid = self._runners.pop(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        send(self._channel, Ended(pid, how_it_ended(code)))


def _leave(*_: object) -> None:
    # Shutting a socket down and closing it each send SIGIO; the second would interrupt the exit.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    sys.exit(0)


def _require_one_thread() -> None:
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while (left := len(os.listdir("/proc/self/task")) - 1) and time.monotonic() < deadline:
        time.sleep(0.001)
    if left:
        raise JobFailed(
            f"building the pipeline, or a module to preload, has left {left} threads running, and "
            "a process with threads cannot be forked; preload fewer modules, or use processes of "
            "your own with a shmload.Handle"
        )


if __name__ == "__main__":
    main()
