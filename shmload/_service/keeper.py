"""The running service: a loop that lets go of what is idle for its time or exceeds the budget.

Loads keep within the budget by themselves, before they decode. The loop is for what was resident
before the service started, and for what has become resident without a decode.

Guarantee: `kill -9` loses nothing. Segments are files in /dev/shm, with last use and pin in the
files' metadata, and leases are kernel locks.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator

import msgspec

from shmload._host.procfs import cgroup_limit_nbytes
from shmload._host.shm import shm_nbytes, shm_total_nbytes
from shmload._segments.eviction import evict_for
from shmload._segments.names import segment_names
from shmload._segments.removal import remove_expired
from shmload._service.notice import Notice, Status, service_budget
from shmload._wording import format_nbytes, logger_of

logger = logger_of(__name__)

_SWEEP_MS = 5000


class Keeper:
    """The service of this process; `close` ends it.

    Args:
        budget_nbytes: what may be resident, in bytes.
        to_preload: how many sources another thread warms, which calls `note_preloaded`.

    Raises:
        ServiceError: another service runs.
        SegmentUntrusted: another user has the name of its notice.
    """

    def __init__(self, budget_nbytes: int, to_preload: int = 0) -> None:
        self.status = Status(
            pid=os.getpid(),
            started_at=time.time(),
            budget_nbytes=budget_nbytes,
            to_preload=to_preload,
        )
        """What `shmload status` shows."""
        self._notice = Notice(self.status)
        self._is_stopping = False
        self._said = ""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)

    @property
    def wake_fd(self) -> int:
        """A descriptor that becomes readable when the service must end, and stays so."""
        return self._woken.fileno()

    @property
    def signalled_fd(self) -> int:
        """A descriptor that makes the other readable when something is written to it."""
        return self._wake.fileno()

    def stop(self) -> None:
        """Tell the service to end; a second call is fine. Safe in a signal handler."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x", socket.MSG_DONTWAIT)

    def run(self) -> None:
        """Keep the budget until `stop` is called."""
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        while not self._is_stopping:
            self.sweep()
            if poll.poll(_SWEEP_MS):
                self.stop()

    def sweep(self) -> None:
        """Let go of what is idle for its time, and of what exceeds the budget."""
        remove_expired()
        budget, said = self.status.budget_nbytes, ""
        try:
            evict_for(0, service_budget(budget))
            nbytes = sum(map(shm_nbytes, segment_names()))
            if nbytes > budget:
                said = (
                    f"{format_nbytes(nbytes)} are resident, more than the budget of "
                    f"{format_nbytes(budget)}; they are in use (`shmload ls`) or pinned "
                    "(`shmload unpin`), and go as soon as they are idle"
                )
        except OSError as exc:
            said = f"what is resident cannot be looked at: {exc}"
        if said and said != self._said:
            logger.warning("%s", said)
        self._said = said

    def note_preloaded(self, *, is_resident: bool) -> None:
        """Note that the next source of the list is resident, or could not be warmed."""
        self.status = msgspec.structs.replace(
            self.status,
            preloaded=self.status.preloaded + 1,
            failed_preloads=self.status.failed_preloads + (not is_resident),
        )
        self._notice.post(self.status)

    def close(self) -> None:
        """Say that no service runs; a second call is fine."""
        self.stop()
        self._notice.close()
        self._wake.close()
        self._woken.close()


def notify_systemd(message: str) -> None:
    """Tell systemd the state, if it started this process (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with (
        contextlib.suppress(OSError),  # as sd_notify(3) advises
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier,
    ):
        # A leading @ means the zero byte of an abstract socket address.
        notifier.connect("\0" + address[1:] if address.startswith("@") else address)
        notifier.send(message.encode())


def default_budget() -> int:
    """Return half of the smaller limit, /dev/shm or the memory control group, in bytes."""
    return min(_limits().values()) // 2


def budget_warnings(budget: int) -> Iterator[str]:
    """Yield warnings for a budget, in bytes, that cannot be reached."""
    if budget == 0:
        yield "the budget is 0: each load that keeps weights is refused"
    for name, nbytes in _limits().items():
        if budget > nbytes:
            yield (
                f"the budget is {format_nbytes(budget)} but {name} allows for "
                f"{format_nbytes(nbytes)}; what is resident stays within that"
            )


def _limits() -> dict[str, int]:
    """Return the limits for all segments together, in bytes, by name."""
    limits = {"/dev/shm": shm_total_nbytes(), "the memory control group": cgroup_limit_nbytes()}
    return {name: limit for name, limit in limits.items() if limit is not None}
