"""A segment in the making: its part, or a stand-in that has its header and no data."""

import os

from shmload._host.descriptors import Descriptor
from shmload._host.linux import (
    is_named,
    shm_open,
    shm_rename,
    shm_unlink,
    try_lock,
    unlock,
    wait_lock,
    write_at,
)
from shmload._segments.layout import Layout
from shmload._segments.names import new_part_name, part_name
from shmload._segments.segment import READ_ONLY, SHARED, Segment, Stay


class Part(Descriptor):
    """A segment that this process builds: it holds the exclusive lock.

    Owns one descriptor until `publish` passes it on, or `close` gives everything back.
    """

    def __init__(self, name: str, fd: int) -> None:
        super().__init__(fd)
        self.name = name
        self._digest_offset = 0
        self._is_published = False

    def prepare(self, layout: Layout) -> None:
        """Give it its length and its header. Its data reads as zeros until it is filled."""
        os.ftruncate(self.fd, layout.nbytes)
        write_at(self.fd, layout.header, 0)
        self._digest_offset = layout.digest_offset

    def renew(self) -> None:
        """Begin again in another inode, which nobody was lent; what the old one has is dropped."""
        fd = self._create_another()
        old, self.fd = self.fd, fd
        os.ftruncate(old, 0)
        unlock(old)  # whoever was lent the old one has its lock too; who waits for it begins anew
        os.close(old)

    def _create_another(self) -> int:
        # It takes the part's name in one step, so that nobody finds none and builds one of its own.
        name = new_part_name(self.name)
        while True:
            fd = shm_open(name, create=True, writable=True)
            assert fd is not None, "created if missing"
            try:
                # Whoever collects garbage may hold it for a moment, or have removed it.
                if wait_lock(fd, exclusive=True, timeout_s=1.0) and is_named(fd, name):
                    os.ftruncate(fd, 0)
                    shm_rename(name, part_name(self.name))
                    return fd
            except BaseException:
                shm_unlink(name)
                os.close(fd)
                raise
            os.close(fd)

    def publish(self, digest: str, stay: Stay) -> Segment:
        """Declare it complete.

        Args:
            digest: of its data, 32 hexadecimal digits.
            stay: how long it stays; it gets its final name unless it is private.
        """
        write_at(self.fd, digest.encode(), self._digest_offset)
        mark = SHARED if stay is Stay.SHARED else 0
        if mark:  # before it has a name that would stay
            os.fchmod(self.fd, 0o600 | mark)
        if stay is Stay.PRIVATE:
            shm_unlink(part_name(self.name))
        else:
            shm_rename(part_name(self.name), self.name)
        # Not earlier: who takes over from a builder that dies right here must be able to open it.
        os.fchmod(self.fd, READ_ONLY | mark)
        try_lock(self.fd, exclusive=False)
        self._is_published = True
        return Segment(self.name, self.fd)

    def close(self) -> None:
        """Remove it; again, or after `publish`, does nothing."""
        if self._is_published:
            return  # the descriptor is the segment's now
        fd = self.take()
        if fd >= 0:
            if is_named(fd, part_name(self.name)):
                shm_unlink(part_name(self.name))
            unlock(fd)  # a mapping that is still around would keep the lock
            os.close(fd)


class Hollow(Descriptor):
    """What stands in for a segment whose bytes never come to lie in it: a header and no data.

    Models are built over it as over a part, while their bytes go elsewhere. It has no name, and
    takes no memory but for its header and the pages that somebody looks at. Owns one descriptor.
    """

    def __init__(self, name: str) -> None:
        super().__init__(os.memfd_create(name, os.MFD_CLOEXEC))
        self.name = name

    def prepare(self, layout: Layout) -> None:
        """Give it its length and its header."""
        os.ftruncate(self.fd, layout.nbytes)
        write_at(self.fd, layout.header, 0)
