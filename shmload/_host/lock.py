"""A lock of a file that one process holds, or hands to a process that it starts."""

import os
from typing import Self

from shmload._host.descriptors import Descriptor
from shmload._host.linux import close_sharing_lock, try_lock, unlock


class Lock(Descriptor):
    """An exclusive flock that is held as long as a descriptor of it is open, here or in a child."""

    @classmethod
    def try_take(cls, path: str | os.PathLike[str]) -> Self | None:
        """Take the lock of a file, which is made if it is missing; None if another holds it.

        Raises:
            OSError: the file cannot be made or opened.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if try_lock(fd, exclusive=True):
            return cls(fd)
        os.close(fd)
        return None

    def leave(self) -> None:
        """Close it here; the process that has inherited it holds the lock from now on."""
        close_sharing_lock(self.take())

    def give_back(self) -> None:
        """Free the lock for all who have a descriptor of it, also for the process that left it."""
        unlock(self.fd)

    def take_again(self) -> bool:
        """Take it once more; return False if another process holds it now."""
        return try_lock(self.fd, exclusive=True)
