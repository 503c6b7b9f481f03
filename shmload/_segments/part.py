"""A segment that is being built: its part, or a stand-in that has a header and no data."""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._host.descriptors import Descriptor, close, try_lock, unlock, wait_lock
from shmload._host.memory import PAGE_NBYTES
from shmload._host.shm import is_named, shm_open, shm_rename, shm_unlink, write_at
from shmload._segments.layout import Layout
from shmload._segments.mode import READ_ONLY, SHARED
from shmload._segments.names import new_part_name, part_name
from shmload._segments.segment import Segment, Stay
from shmload.errors import SegmentRemoved


class Part(Descriptor):
    """A segment that this process builds: it holds the exclusive lock.

    Owns one descriptor, until `publish` makes it the segment's or `close` removes the part.

    Args:
        name: of the segment.
        fd: of the part, locked; None for one without a name in /dev/shm, which stays private.
    """

    def __init__(self, name: str, fd: int | None) -> None:
        super().__init__(_make_nameless(name) if fd is None else fd)
        self.name = name
        self.has_name = fd is not None
        self._digest_offset = 0
        self._is_published = False

    def prepare(self, layout: Layout) -> None:
        """Set its length and write its header. Its data reads as zeros until it is filled."""
        os.ftruncate(self.fd, layout.nbytes)
        write_at(self.fd, layout.header, 0)
        self._digest_offset = layout.digest_offset

    def renew(self) -> None:
        """Start over in a new inode, which no service has; drop the old one's bytes."""
        fd = self._create_another() if self.has_name else _make_nameless(self.name)
        old, self.fd = self.fd, fd
        os.ftruncate(old, 0)
        unlock(old)  # the service's descriptor shares the lock; processes that wait start over
        os.close(old)

    def _create_another(self) -> int:
        # Replace the part's name in one step: a process that found no part would build its own.
        name = new_part_name(self.name)
        while True:
            fd = shm_open(name, create=True, writable=True)
            assert fd is not None, "created if missing"
            try:
                # A process that collects garbage may hold it for a moment, or have removed it.
                if wait_lock(fd, exclusive=True, timeout_s=1.0) and is_named(fd, name):
                    os.ftruncate(fd, 0)
                    with contextlib.suppress(SegmentRemoved):  # then try again
                        shm_rename(name, part_name(self.name))
                        return fd
            except BaseException:
                shm_unlink(name)
                close(fd)
                raise
            close(fd)

    def publish(self, digest: str, stay: Stay) -> Segment:
        """Write the digest and give the part its final name.

        Args:
            digest: of its data, 32 hexadecimal digits.
            stay: how long the segment stays; a private one gets no name.

        Returns:
            The segment, which owns the descriptor from now on.

        Raises:
            SegmentRemoved: the part's name was removed from outside, and the segment needs one.
            SegmentUntrusted: the segment's name belongs to another user, likewise.
        """
        # Another load may have begun a part of that name since, which must not be renamed.
        is_mine = is_named(self.fd, part_name(self.name))
        if not is_mine and stay is not Stay.PRIVATE:
            raise SegmentRemoved(part_name(self.name))
        write_at(self.fd, digest.encode(), self._digest_offset)
        mark = SHARED if stay is Stay.SHARED else 0
        if mark:  # before it gets its name: if this process dies in between, the name must go too
            os.fchmod(self.fd, 0o600 | mark)
        if stay is Stay.PRIVATE:
            if is_mine:
                shm_unlink(part_name(self.name))
        else:
            shm_rename(part_name(self.name), self.name)
        # Not earlier: if this process dies before the rename, the next builder must write to it.
        os.fchmod(self.fd, READ_ONLY | mark)
        try_lock(self.fd, exclusive=False)
        self._is_published = True
        # The part keeps the number: another thread may be about to map it through the part.
        return Segment(self.name, self.fd)

    def close(self) -> None:
        """Remove the part; again, or after `publish`, does nothing."""
        if self._is_published:
            return  # the descriptor is the segment's now
        fd = self.take()
        if fd >= 0:
            if is_named(fd, part_name(self.name)):
                shm_unlink(part_name(self.name))
            close(fd)  # and unlock it: a mapping that is still around would keep the lock


class Hollow(Descriptor):
    """A stand-in for a segment whose bytes go elsewhere: it has a header and no data.

    Models are built over it as over a part. It has no name, and takes memory only for its header
    and the pages that are read. Owns one descriptor.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_make_nameless(name))
        self.name = name
        self._data_offset = 0

    def prepare(self, layout: Layout) -> None:
        """Set its length and write its header."""
        os.ftruncate(self.fd, layout.nbytes)
        write_at(self.fd, layout.header, 0)
        self._data_offset = len(layout.header)

    @property
    def was_read(self) -> bool:
        """Whether some code has read its zeros for weights: more than each tensor's first page.

        safetensors reads the first byte of each tensor. The kernel makes a page when it is first
        read. With huge pages the answer may be True for first bytes alone.
        """
        header = SAFETENSORS.read_header(self.fd, Path(self.name))
        first = {(self._data_offset + tensor.begin) // PAGE_NBYTES for tensor in header.tensors}
        pages = itertools.chain.from_iterable(_pages_made(self.fd, self._data_offset))
        return not first.issuperset(pages)


def _make_nameless(name: str) -> int:
    """Make a file in memory that only its descriptor leads to; it is shown by the name."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    try_lock(fd, exclusive=True)
    return fd


def _pages_made(fd: int, begin: int) -> Iterator[range]:
    """Yield the numbers of the pages of a file in memory that exist, in ranges."""
    while True:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # no more
                return
            raise
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        yield range(begin // PAGE_NBYTES, -(-end // PAGE_NBYTES))
        begin = end
