"""A fork server as its job sees it: start, talk, end."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from shmload._ipc.child import start_with_channel
from shmload._ipc.frames import Inbox, send
from shmload._settings import settings
from shmload.errors import JobFailed
from shmload.integrations._jobs.messages import (
    FromServer,
    Prepared,
    Setup,
    ToServer,
    decode_from_server,
)

# A process with threads cannot be forked. These start none then: torch's pools (torch reads the
# numbers when it is imported), progress bars, and the wait for other ranks of a launcher.
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
        JobFailed: it cannot be started. If it ends at once, only its messages end.
    """

    def __init__(self, handle: str, threads: int, preload: tuple[str, ...]) -> None:
        self.is_prepared = False
        self.since = time.monotonic()
        """When it was started, by the monotonic clock, in seconds."""
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
        """Send a message; False if it does not take it: then it is killed, and its messages end."""
        try:
            send(self.channel, message, fds)
        except OSError:
            self.kill()  # it may be stopped, and have half a message
            return False
        return True

    def messages(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived.

        Raises:
            ProtocolError: what it sent is not a message of this version.
        """
        while (frame := self.inbox.next_frame()) is not None:
            message = decode_from_server(frame)
            if isinstance(message, Prepared):
                self.is_prepared = True
            yield message

    def kill(self) -> None:
        """Send SIGKILL, which ends its runners too; do not wait. Its messages end then."""
        self._child.kill()

    def close(self) -> str:
        """End it and its runners, wait for that, and return how it ended; a second call is fine."""
        with contextlib.suppress(OSError):
            # Closing alone would not reach it while a forked copy of this process has the socket.
            self.channel.shutdown(socket.SHUT_RDWR)
        self._release()
        return self._child.end(ask=False)

    def forget(self) -> None:
        """Close its descriptors in a forked copy of the job's process, which is not its parent."""
        self._release()
        self._child.forget()

    def _release(self) -> None:
        self.channel.close()
        self.inbox.close()
