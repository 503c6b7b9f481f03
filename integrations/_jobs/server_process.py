"""A fork server as its job sees it: start, talk, end."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from shmload._ipc.child import start_with_channel
from shmload._ipc.frames import Inbox, send
from shmload._settings import settings
from shmload.errors import JobFailed
from shmload.integrations._jobs.messages import Setup, ToServer

if TYPE_CHECKING:
    from shmload.integrations._jobs.runner_process import RunnerProcess

# What starts threads cannot be forked: the pools of torch, which it reads of when it is imported,
# bars, and whoever waits for the other ranks of a launcher.
_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "LOCAL_WORLD_SIZE": "1",
}


class ServerProcess:
    """A child that runs `shmload.integrations._jobs.forkserver`, from here until `close`.

    Args:
        handle: of the pipeline, as text.
        threads: of each runner, for torch.
        preload: modules to import beside the libraries.

    Raises:
        JobFailed: it cannot be started. That it ends at once is told by the end of its messages.
    """

    def __init__(self, handle: str, threads: int, preload: tuple[str, ...]) -> None:
        self.is_prepared = False
        self.since = time.monotonic()
        """When it was started, by the monotonic clock, in seconds."""
        self.forked: list[RunnerProcess] = []
        """Asked for and not yet there, in that order; for who has asked to close."""
        path = tuple(os.fsencode(entry) for entry in sys.path if isinstance(entry, str))
        try:
            self._child, self.channel = start_with_channel(
                "shmload.integrations._jobs.forkserver",
                timeout_s=settings().stall_timeout_s,
                env=os.environ | _SINGLE_THREADED,
                stdout=None if sys.__stdout__ else subprocess.DEVNULL,
                stderr=None if sys.__stderr__ else subprocess.DEVNULL,
            )
        except OSError as exc:
            raise JobFailed(
                f"the processes of a job could not be started: {exc}; sys.executable must be a "
                "Python interpreter, with processes, memory and descriptors to spare"
            ) from exc
        self.inbox = Inbox(self.channel)
        setup = Setup(
            handle=handle,
            path=path,
            environment={name: os.environ.get(name) for name in _SINGLE_THREADED},
            threads=threads,
            preload=preload,
        )
        self.send(setup)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def send(self, message: ToServer, fds: tuple[int, ...] = ()) -> bool:
        """Send a message; False if it did not take it, whose end will be heard then."""
        try:
            send(self.channel, message, fds)
        except OSError:
            self.kill()  # it may have been stopped, with half a message
            return False
        return True

    def kill(self) -> None:
        """Kill it, and so its runners; its end is heard by the end of its messages."""
        self._child.kill()

    def close(self) -> str:
        """End it, wait until it and its runners have ended, and return how."""
        with contextlib.suppress(OSError):
            # Closing would tell it nothing while a forked copy of this process has the socket too.
            self.channel.shutdown(socket.SHUT_RDWR)
        self._release()
        return self._child.end(ask=False)

    def forget(self) -> None:
        """Let go of it in a forked copy of the job's process, whose child it is not."""
        self._release()
        self._child.forget()

    def _release(self) -> None:
        self.channel.close()
        self.inbox.close()
