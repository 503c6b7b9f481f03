"""The errors of memory: its limits, its segments, and the directories that show them."""

from collections.abc import Mapping
from os import PathLike

from shmload.errors.sources import ShmloadError


class CapacityError(ShmloadError, OSError):
    """There is not enough memory, or another limit forbids a load.

    Attributes:
        needed: what the load needs, in bytes; None if it was not counted.
        available: what is left, in the same unit, or the value of the limit; None if it was not
            looked at.
        limit: what sets the limit, such as `/dev/shm` or `RLIMIT_NOFILE`.
    """

    needed: int | None = None
    available: int | None = None
    limit: str


class SharedMemoryFull(CapacityError):
    """The file system at /dev/shm, or the budget, is too small."""


class MemoryLimitExceeded(CapacityError):
    """The memory of the machine, or of this process's control group, is too small."""


class DoesNotFit(CapacityError):
    """Weights need more memory on a device, or more of a budget, than there is.

    Attributes:
        device_map: the closest map that fits, to pass instead; None if there is none.
    """

    device_map: Mapping[str, str] | None = None


class SegmentError(ShmloadError):
    """A segment cannot be used, or nothing can be kept in /dev/shm.

    Attributes:
        name: of the segment.
    """

    name: str


class SegmentNotFound(SegmentError, KeyError):
    """No resident model or segment matches a name, or several do.

    Attributes:
        candidates: the names, or ids, that it fits.
    """

    candidates: tuple[str, ...] = ()


class SegmentBusy(SegmentError):
    """A process or a publication uses a segment, so it was not removed.

    Attributes:
        names: names of the segments that are in use.
        removed: names of the other segments of this request, which were removed.
    """

    names: tuple[str, ...]
    removed: tuple[str, ...] = ()


class SegmentCorrupt(SegmentError):
    """A segment's header is damaged, or its bytes do not match the digest there."""


class SegmentUntrusted(SegmentError):
    """A name in /dev/shm belongs to another user or is not a plain private file."""


class SegmentTimeout(SegmentError, TimeoutError):
    """What another process or thread uses, decodes or changes was not free in time."""


class PublicationError(SegmentError):
    """A thing cannot be published, a publication not be loaded, or weights not be updated.

    Attributes:
        reason: what is wrong, by its path.
    """

    reason: str


class ViewRefused(ShmloadError, OSError):
    """A view directory cannot be made at its place.

    Attributes:
        path: the place, or the file in it that is in the way.
    """

    path: str | PathLike[str]
