"""Who closes a file descriptor: one object, once; and which numbers no file of ours may get."""

import os
from typing import Self

from shmload._host.linux import Inode, close, inode_of


class Descriptor:
    """Owns one file descriptor; a context that closes it. The base of what owns an open file.

    A forked child has a descriptor of its own to the same open file: each closes its own, and a
    lock goes with the last.

    Args:
        fd: the descriptor; -1 for none.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """-1 when it was closed or taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def inode(self) -> Inode:
        """What names the file in /proc/self/maps."""
        return inode_of(os.fstat(self.fd))

    def take(self) -> int:
        """Return the descriptor, which is the caller's from now on; -1 if there is none."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        # Forget the number first: the kernel gives it to the next file that is opened, and a second
        # close, from another thread or after an interrupt, would close that one.
        fd = self.take()
        if fd >= 0:
            close(fd)


def occupy_standard_streams() -> None:
    """Open /dev/null under each number from 0 to 2 that is closed, for good.

    Else a part would get such a number, and what a library writes to stderr would go into weights.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != number:  # another thread was quicker
                os.close(opened)
