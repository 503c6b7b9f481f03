"""A lock of a file that one process holds, or hands to a process that it starts."""

import contextlib
import os
from typing import Self

from shmload._host.descriptors import Descriptor
from shmload._host.linux import close_sharing_lock, try_lock, unlock, wait_lock


class Lock(Descriptor):
    """An exclusive flock that is held as long as a descriptor of it is open, here or in a child."""

    @classmethod
    def try_take(
        cls, path: str | os.PathLike[str], *, dir_fd: int | None = None, timeout_s: float = 0.0
    ) -> Self | None:
        """Take the lock of a file, which is made if it is missing; None if another holds it.

        Args:
            path: of the file.
            dir_fd: the directory that a relative path begins at.
            timeout_s: how long to wait for the lock, in seconds.

        Raises:
            OSError: the file cannot be made or opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = cls(os.open(path, flags, 0o600, dir_fd=dir_fd))
        with contextlib.ExitStack() as closing:
            closing.enter_context(lock)
            if not wait_lock(lock.fd, exclusive=True, timeout_s=timeout_s):
                return None
            closing.pop_all()
        return lock

    def leave(self) -> None:
        """Close it here; the process that has inherited it holds the lock from now on."""
        close_sharing_lock(self.take())

    def give_back(self) -> None:
        """Free the lock for all who have a descriptor of it, also for the process that left it."""
        unlock(self.fd)

    def take_again(self) -> bool:
        """Take it once more; return False if another process holds it now."""
        return try_lock(self.fd, exclusive=True)
