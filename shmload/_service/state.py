"""What all sessions of the service share: the budget and the counters.

Guarantee: `kill -9` loses nothing. Segments are files in /dev/shm, with last use
and pin in the files' metadata, and leases are kernel locks; a new service finds them all.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from shmload._segments.eviction import room_nbytes
from shmload._segments.listing import SegmentInfo, segments_by_lock
from shmload._segments.removal import remove_expired
from shmload._segments.roots import Root, find_roots
from shmload._segments.users import users_of
from shmload._service.budget import Claim, Reservations, service_budget
from shmload._service.metrics import Usage
from shmload._service.protocol import Holders, Status
from shmload._wording import logger_of
from shmload.errors import CapacityError, ShmloadError

logger = logger_of(__name__)

_JOIN_TIMEOUT_S = 10.0
# How often to look for segments that were idle for their time, in seconds.
_SWEEP_S = 30.0


class Preloading:
    """How far the preload list is; one thread writes it."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.current = ""
        """The source that is being warmed."""
        self.failed: list[str] = []
        """The sources that could not be warmed."""

    def begin(self, source: str) -> None:
        """Note which source is being warmed now."""
        self.current = source

    def end(self, *, is_resident: bool) -> None:
        """Note that the source that was begun is resident, or could not be warmed."""
        self.failed += [] if is_resident else [self.current]
        self.done += 1

    def reasons(self) -> Iterator[str]:
        """Yield what is still to be done."""
        if self.done < self.total:
            now = f": {self.current}" if self.current else ""
            yield f"preloading, {self.done} of {self.total} done{now}"


class ServiceState:
    """State shared by all sessions; thread-safe.

    Args:
        budget_nbytes: limit for resident segments, in bytes.
    """

    def __init__(self, budget_nbytes: int) -> None:
        self._budget = service_budget(budget_nbytes)
        self._began_at = time.monotonic()
        self.reservations = Reservations(self._budget)
        """What loads have reserved in the budget."""
        self.usage = Usage(resident=_resident_models)
        """What was counted for each model."""
        self.preloading = Preloading()
        """How far the preload list is."""
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._background: list[threading.Thread] = []

    @property
    def budget_nbytes(self) -> int:
        """Limit for resident segments, in bytes."""
        return self._budget.nbytes

    @property
    def is_stopping(self) -> bool:
        """Whether the service has been told to end."""
        return self._stopping.is_set()

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
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Wait for the background threads."""
        self.stop()
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while self._background:
            self._background.pop().join(max(0, deadline - time.monotonic()))
        self._wake.close()
        self._woken.close()

    def reserve(
        self, claim: Claim, nbytes: int, timeout_s: float, on_wait: Callable[[], None]
    ) -> list[str]:
        """Do what `Reservations.reserve` does, and count; return the names of what was evicted."""
        try:
            evicted = self.reservations.reserve(claim, nbytes, timeout_s, on_wait)
        except CapacityError:
            self.usage.count("refusals", 1)
            raise
        self.usage.count("evictions", len(evicted))
        return [info.name for info in evicted]

    def name_of(self, model: Root) -> str:
        """Return what a model is called in the log; its path if that cannot be found out now."""
        try:
            return self.usage.name_of(model)
        except (
            ShmloadError,
            OSError,
        ):  # too few descriptors, for instance
            return str(model.path)

    def reasons_unhealthy(self) -> list[str]:
        """Say why the service no longer serves clients; nothing if it does."""
        return ["the service ends"] if self.is_stopping else []

    def reasons_unready(self) -> list[str]:
        """Say why loads should not come yet; nothing if they may."""
        if self.is_stopping:
            return self.reasons_unhealthy()
        return list(self.preloading.reasons())

    def remove_expired(self) -> None:
        """Remove what is idle for its time, again and again until the service ends."""
        while not self._stopping.wait(_SWEEP_S):
            remove_expired()

    def run_in_background(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread; it must return soon after the service stops."""
        thread = threading.Thread(target=work, name="shmload-background", daemon=True)
        thread.start()
        self._background.append(thread)

    def status(self) -> Status:
        """Return the status."""
        found = segments_by_lock()  # what is mapped is looked at below, once
        counted = self.usage.sums()
        return Status(
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._began_at,
            budget_nbytes=self.budget_nbytes,
            resident_nbytes=sum(info.nbytes for info in found),
            segments=len(found),
            pinned=sum(info.is_pinned for info in found),
            waiting_for_room=self.reservations.waiting,
            reserved_nbytes=self.reservations.nbytes,
            clients=self.reservations.clients,
            hits=int(counted["hits"]),
            misses=int(counted["misses"]),
            evictions=int(counted["evictions"]),
            refusals=int(counted["refusals"]),
            leases=tuple(_leases(found)),
            models=self.usage.models(),
            room_nbytes=max(0, room_nbytes()),
        )


def _resident_models() -> Collection[Root]:
    sources = (info.source for info in segments_by_lock())
    return find_roots(source for source in sources if source).values()


def _leases(found: Iterable[SegmentInfo]) -> Iterator[Holders]:
    """Yield the holders of each leased segment, without this process."""
    known = users_of(info.name for info in found)
    for info in found:
        pids = known.get(info.name, set())
        others = pids - {os.getpid()}
        if others or (info.is_leased and not pids):
            yield Holders(info.name, tuple(sorted(others)))
