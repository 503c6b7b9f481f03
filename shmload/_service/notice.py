"""The service's notice: a file in /dev/shm that says that it runs, and how it is doing.

    name                        lock        what it means
    shmload-UID-service.part    exclusive   a service runs; the file has its status
    shmload-UID-service.part    free        its service was killed; goes as parts do
    none                        none        no service runs

Guarantee: at most one service of a user in one /dev/shm, by a lock that the kernel releases when
its process ends. A process that sees the segments sees the notice, also in another container.
"""

import contextlib
import os
import signal
import time

import msgspec

from shmload._host.descriptors import Descriptor, inode_of, try_lock, wait_lock
from shmload._host.procfs import lock_holders
from shmload._host.shm import is_named, shm_open, shm_stat, shm_unlink, write_at
from shmload._segments.eviction import Budget
from shmload._segments.names import lock_name
from shmload.errors import SegmentUntrusted, ServiceError

# A process that looks for leftovers holds a free notice for a moment.
_LOCK_S = 1.0
# More than any status takes, so that a longer one leaves nothing of a shorter one behind.
_NBYTES = 512
# How often a status that is just being written is read again.
_TRIES = 100
_POLL_S = 0.001


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a service says about itself."""

    pid: int
    """Its process id, in its own pid namespace."""
    started_at: float
    """In seconds since the epoch."""
    budget_nbytes: int
    """What may be resident, in bytes."""
    to_preload: int = 0
    """How many sources are on its list."""
    preloaded: int = 0
    """How many of them are done, with those that failed."""
    failed_preloads: int = 0
    """How many of them could not be warmed; its log says why."""


def service_budget(nbytes: int) -> Budget:
    """Return a service's budget of so many bytes."""
    return Budget(nbytes, "the service's budget", "raise `shmload serve --budget`")


class Notice(Descriptor):
    """The notice of this process, from here until `close`.

    Args:
        status: what it says first.

    Raises:
        ServiceError: another service runs.
        SegmentUntrusted: its name belongs to another user.
        SharedMemoryFull: /dev/shm is full.
    """

    def __init__(self, status: Status) -> None:
        while True:
            fd = shm_open(_name(), create=True, writable=True)
            assert fd is not None, "created if missing"
            super().__init__(fd)
            if not wait_lock(fd, exclusive=True, timeout_s=_LOCK_S):
                super().close()
                raise ServiceError(
                    f"a service is running (process {_holder() or 'unknown'}); use it, or end it "
                    "with `shmload shutdown`"
                )
            if is_named(fd, _name()):  # else it was removed between open and lock
                break
            super().close()
        try:
            os.ftruncate(fd, 0)
            self.post(status)
        except BaseException:
            self.close()
            raise

    def post(self, status: Status) -> None:
        """Say this from now on."""
        write_at(self.fd, msgspec.json.encode(status).ljust(_NBYTES), 0)

    def close(self) -> None:
        """Say that no service runs; a second call is fine."""
        if self.fd >= 0:
            shm_unlink(_name())  # while it is locked, so it is still this one
        super().close()


def service_status() -> Status | None:
    """Return what the running service says; None if there is none, or another user has its name."""
    try:
        fd = shm_open(_name())
    except SegmentUntrusted:
        return None
    if fd is None:
        return None
    with Descriptor(fd):
        for _ in range(_TRIES):
            if try_lock(fd, exclusive=False):
                break  # its service was killed
            with contextlib.suppress(msgspec.DecodeError):  # it is being written
                return msgspec.json.decode(os.pread(fd, _NBYTES, 0), type=Status)
            time.sleep(_POLL_S)
    return None


def require_service() -> Status:
    """Return what the running service says.

    Raises:
        ServiceError: none runs.
    """
    status = service_status()
    if status is None:
        raise ServiceError("no service runs here; start one with `shmload serve`")
    return status


def end_service() -> int:
    """Tell the running service to end, by SIGTERM; return its process id.

    Raises:
        ServiceError: none runs, or this process cannot see it.
    """
    require_service()
    pid = _holder()
    if pid is None:
        raise ServiceError("the service runs in another container; end it there")
    with Descriptor(os.pidfd_open(pid)) as process:
        if _holder() == pid:  # else it has ended, and the number may be another's by now
            signal.pidfd_send_signal(process.fd, signal.SIGTERM)
    return pid


def _name() -> str:
    return lock_name("service")


def _holder() -> int | None:
    """Return the process that has the notice; None if this one cannot see it."""
    found = shm_stat(_name())
    return min(lock_holders().get(inode_of(found), ()), default=None) if found else None
