"""How many bytes of weights a process may keep pinned: the kernel can neither move nor swap them.

The size of each part counts, in whole pages and nothing more: torch's own pinned memory would be
rounded up to powers of two. Parts that several processes pin are the same pages, and count in each.
"""

import functools
import threading

from shmload._segments.users import page_lock_limit
from shmload._wording import format_nbytes, logger_of

logger = logger_of(__name__)


class Budget:
    """A number of bytes that may be taken; several threads may use it.

    Args:
        limit_nbytes: the most that may be taken at a time.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.taken_nbytes = 0
        """What is taken now."""
        # A finalizer may give back at any point of a thread that has the lock.
        self._lock = threading.RLock()
        self._has_said = False

    def take(self, nbytes: int) -> bool:
        """Take some bytes if they are left; return whether they were; log the first refusal."""
        with self._lock:
            fits = self.taken_nbytes + nbytes <= self.limit_nbytes
            is_news = not (fits or self._has_said)
            if fits:
                self.taken_nbytes += nbytes
            else:
                self._has_said = True
        if is_news:
            logger.warning(
                "%s of weights that wait for an accelerator are pinned, and no more than %s may "
                "be: the others are copied more slowly (SHMLOAD_PAGE_LOCKED sets the limit)",
                format_nbytes(self.taken_nbytes),
                format_nbytes(self.limit_nbytes),
            )
        return fits

    def give_back(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self.taken_nbytes -= nbytes


@functools.cache
def own_budget() -> Budget:
    """Return this process's budget for pinned weights."""
    return Budget(page_lock_limit())
