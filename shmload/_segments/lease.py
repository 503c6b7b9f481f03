"""A lease keeps a segment alive after the load returns; it is released with its tensors or at exit.

Guarantee: a shared segment's name is removed with the last lease, even if a child has that lease
and multiprocessing ends the child while this process exits.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Collection

from shmload._host.descriptors import try_lock
from shmload._host.shm import reopen
from shmload._segments.removal import LISTING_S, give_back, remove_unused
from shmload._segments.segment import Segment
from shmload._segments.view import remove_dead_views

# multiprocess is a copy of multiprocessing; datasets uses it.
_CHILDREN_KEEPERS = ("multiprocessing.util", "multiprocess.util")


class Lease:
    """A lease on a segment, with a lock of its own.

    Releasing the last lease of a shared segment removes its name.

    Args:
        segment: stays the caller's.
        crosses_forks: whether forked children share the lease, which then ends when all of them
            have released it; otherwise a child releases its copy at once.
    """

    def __init__(self, segment: Segment, *, crosses_forks: bool = True) -> None:
        self.name = segment.name
        self.crosses_forks = crosses_forks
        fd = reopen(segment.fd)
        # Release it even if it is dropped before the caller has it, for instance by an interrupt.
        self._closing = weakref.finalize(self, _give_back, fd, self.name)
        self._closing.atexit = False  # `_close_all` does it, in the right order
        try_lock(fd, exclusive=False)  # cannot fail: the segment holds a shared lock already
        _live.add(weakref.ref(self, _live.discard))
        if segment.is_shared:
            _names.add(self.name)
            _look_again_at_the_end()

    def close(self, wait_s: float = LISTING_S) -> None:
        """Release the lease; a second call does nothing.

        Args:
            wait_s: as for `remove_unused`.
        """
        # Detach it instead of calling it: at exit a finalizer's call does nothing.
        if found := self._closing.detach():
            _, _, (fd, name), _ = found
            _give_back(fd, name, wait_s)

    def end_with(self, users: Collection[object]) -> None:
        """Release the lease when all of some objects are gone; there is at least one."""
        left = len(users)

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.close()

        for user in users:
            weakref.finalize(user, count).atexit = False  # `_close_all` does it, in the right order

    def open_again(self) -> int | None:
        """Return a descriptor of the segment without a lease, the caller's; None after `close`."""
        found = self._closing.peek()
        return reopen(found[2][0]) if found else None

    def touch(self) -> None:
        """Record that the segment is used now; after `close` does nothing."""
        if found := self._closing.peek():
            _, _, (fd, name), _ = found
            Segment(name, fd).touch()


def _give_back(fd: int, name: str, wait_s: float = LISTING_S) -> None:
    segment = Segment(name, fd)
    segment.touch()  # it was in use until now
    give_back(segment, wait_s=wait_s)


# No WeakSet: another thread may add to it while it is iterated over.
_live: set[weakref.ref[Lease]] = set()
# Names of all shared segments that this process has had a lease on.
_names: set[str] = set()
_looking_pids: set[tuple[str, int]] = set()


def _leases() -> list[Lease]:
    """Return all leases of this process."""
    return [lease for found in list(_live) if (lease := found())]


@atexit.register
def _close_all() -> None:
    for lease in _leases():
        lease.touch()  # a resident segment was in use until now
        if lease.name in _names:
            lease.close(wait_s=0)
    remove_unused(_names)
    if _names:
        remove_dead_views()  # of children that a pool has killed in the middle of a load


def _look_again_at_the_end() -> None:
    """Run `_close_all` once more after multiprocessing has ended this process's children.

    If multiprocessing was imported before this module, it ends its daemonic children only after
    our atexit handler. In its own forked children it runs its finalizers and no atexit handlers.
    """
    for module in _CHILDREN_KEEPERS:
        keeper = sys.modules.get(module)
        place = (module, os.getpid())
        if keeper and place not in _looking_pids:
            _looking_pids.add(place)
            keeper.Finalize(None, _close_all, exitpriority=-1)


def _close_in_child() -> None:
    for lease in _leases():
        if not lease.crosses_forks:
            # Removes the name if the parent has released its own already. A fork does not wait for
            # that: the parent looks again at its exit.
            lease.close(wait_s=0)


os.register_at_fork(after_in_child=_close_in_child)
