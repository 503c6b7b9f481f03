"""The lock of a folder that one process at a time may write to."""

import os
import weakref
from pathlib import Path

from shmload._host.changes import add_row
from shmload._host.linux import close_sharing_lock, inode_of, try_lock
from shmload._host.procfs import lock_holders
from shmload.errors import ResultsBusy
from shmload.integrations._results.names import LOCK_NAME


class FolderLock:
    """The lock of a folder, held until `release`; the kernel drops it when the process ends.

    A forked child does not have it.

    Raises:
        ResultsBusy: another process, or another object in this one, has it.
        OSError: the file system refuses.
    """

    def __init__(self, folder: Path) -> None:
        # A file, not the directory: NFS needs it open for writing, which a directory cannot be.
        self._fd: int | None = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(self._fd, exclusive=True):
                inode = inode_of(os.fstat(self._fd))
                raise ResultsBusy(folder, lock_holders().get(inode, ()))
        except BaseException:
            self.release()
            raise
        _held.add(self)

    @property
    def is_held(self) -> bool:
        """Tell whether this process has the lock."""
        return self._fd is not None

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            close_sharing_lock(fd)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


# A child's copy of the descriptor would keep the lock held after its parent's death.
add_row("locks of folders", lambda: sum(lock.is_held for lock in list(_held)), _release_all)
