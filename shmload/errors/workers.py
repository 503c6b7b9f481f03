"""The errors of worker processes and of messages."""

from os import PathLike

from shmload.errors.base import ShmloadError

_Path = str | PathLike[str]


class WorkerError(ShmloadError):
    """A worker process failed."""


class WorkerDied(WorkerError):
    """Workers kept dying on the same piece."""

    def __init__(self, path: _Path, how: str) -> None:
        self.path = path
        hint = "; perhaps the kernel ran out of memory, see dmesg" if "SIGKILL" in how else ""
        super().__init__(f"a worker died ({how}) while it decoded {path}, twice{hint}")


class WorkerStalled(WorkerError):
    """Workers made no progress within the deadline."""

    def __init__(self, path: _Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        super().__init__(
            f"no progress on {path} in {timeout_s:g} s, twice; check the disk it is on or raise "
            "SHMLOAD_STALL_TIMEOUT_S"
        )


class WorkerFailed(WorkerError):
    """A worker could not start or failed in its own code; its last output is a note."""


class ProtocolError(ShmloadError):
    """A message is not one of this version's protocol."""
