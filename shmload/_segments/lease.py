"""A lease that lasts longer than the load that took it, and goes before its process does.

Guarantee: a shared segment's name goes with the last lease, also where the last is a child's that
multiprocessing ends while this process ends.
"""

import atexit
import os
import sys
import weakref

from shmload._host.linux import reopen, try_lock
from shmload._segments.removal import remove_if_unused
from shmload._segments.segment import Segment, is_shared
from shmload._segments.view import remove_dead_views

# The standard library's, and that of datasets, which is a copy of it.
_CHILDREN_KEEPERS = ("multiprocessing.util", "multiprocess.util")


class Lease:
    """A hold on a segment, with a lock of its own.

    With the last lease of a shared segment goes its name.

    Args:
        segment: stays the caller's.
        crosses_forks: whether a forked child has it too: it goes when both have given it back.
    """

    def __init__(self, segment: Segment, *, crosses_forks: bool = True) -> None:
        self.name = segment.name
        self.crosses_forks = crosses_forks
        fd = reopen(segment.fd)
        # Also where it is dropped: by an interrupt, for instance, before anybody has it.
        self._closing = weakref.finalize(self, _give_back, fd, self.name)
        self._closing.atexit = False  # see below
        try_lock(fd, exclusive=False)  # as the segment's lease does, so nobody is in the way
        if segment.is_shared:
            _shared.add(self)
            _names.add(self.name)
            _look_again_at_the_end()

    def close(self) -> None:
        """Give it back; again is fine."""
        if found := self._closing.detach():  # and no call: at the program's end that does nothing
            _, give_back, (fd, name), _ = found
            give_back(fd, name)


def _give_back(fd: int, name: str) -> None:
    may_be_last = is_shared(os.fstat(fd))
    os.close(fd)
    if may_be_last:
        remove_if_unused(name)


_shared: weakref.WeakSet[Lease] = weakref.WeakSet()
# Of all shared segments that this process has had.
_names: set[str] = set()
_looking_pids: set[tuple[str, int]] = set()


@atexit.register
def _close_all() -> None:
    for lease in list(_shared):
        lease.close()
    for name in _names:
        remove_if_unused(name)
    if _names:
        remove_dead_views()  # of children that were ended while they loaded, as pools do


def _look_again_at_the_end() -> None:
    """Have the names looked at once more when this process's children have ended.

    Where multiprocessing was imported before this module, it ends its daemonic children only after
    the above; and in a forked child of its own it calls nothing else.
    """
    for module in _CHILDREN_KEEPERS:
        keeper = sys.modules.get(module)
        place = (module, os.getpid())
        if keeper and place not in _looking_pids:
            _looking_pids.add(place)
            keeper.Finalize(None, _close_all, exitpriority=-1)


def _close_in_child() -> None:
    for lease in list(_shared):
        if not lease.crosses_forks:
            lease.close()  # the last if the parent has been quicker


os.register_at_fork(after_in_child=_close_in_child)
