"""The ranks of one job on one host: segments that one decodes stay until all have attached."""

import threading
import time
from collections.abc import Collection, Iterable

from shmload._segments.lease import Lease
from shmload._segments.segment import Segment
from shmload._segments.users import holders
from shmload._settings import local_world_size

# How late a rank may be. Ranks start together; their imports differ by seconds.
_PATIENCE_S = 60.0
_POLL_S = 0.2
# Each rank polls by itself: a rank that left at once might be missed by another one's poll.
_FAREWELL_S = 1.0


def linger(segments: Iterable[Segment]) -> None:
    """Keep leases of shared segments until every rank on this host has one; returns at once.

    A rank may be done with them before another one attaches: it has moved its weights to a device,
    or dropped them. The leases end after a minute at the latest, or with the process.

    Args:
        segments: stay the caller's.
    """
    ranks = local_world_size()
    # A forked child has no thread that waits: it would keep the leases as long as it lives.
    leases = [Lease(s, crosses_forks=False) for s in segments if s.is_shared]
    if not leases:
        return
    thread = threading.Thread(
        target=_wait, args=(leases, ranks), name="shmload-linger", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # the system has no more threads
        _close(leases)


def _wait(leases: Collection[Lease], ranks: int) -> None:
    names = [lease.name for lease in leases]
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = holders(names)
        if all(len(found.get(name, ())) >= ranks for name in names):
            time.sleep(_FAREWELL_S)
            break
        time.sleep(_POLL_S)
    _close(leases)


def _close(leases: Collection[Lease]) -> None:
    for lease in leases:
        lease.close()
