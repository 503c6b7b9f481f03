"""The errors of memory and other limits."""

import errno
from collections.abc import Mapping
from os import PathLike
from typing import Self

from shmload._wording import format_nbytes
from shmload.errors.base import ShmloadError

_Path = str | PathLike[str]


class CapacityError(ShmloadError, OSError):
    """There is not enough memory; raised before the first byte of weights is read.

    Attributes:
        needed: what the load needs, in bytes; or 1 inode if the file system has none left.
        available: what is left, in the same unit; None if it was not looked at.
        limit: what sets the limit, such as `/dev/shm`.
        most: what the limit leaves if all else goes, in the same unit; None if that is not known.
    """

    most: int | None

    def __init__(
        self,
        needed: int,
        available: int | None,
        limit: str,
        remedy: str,
        unit: str | None = None,
        most: int | None = None,
    ) -> None:
        self.needed = needed
        self.most = most
        self.available = available
        self.limit = limit
        amounts = [f"{n} {unit}" if unit else format_nbytes(n) for n in (needed, available or 0)]
        what = f" but {limit} leaves {amounts[1]}" if available is not None else f", of {limit}"
        super().__init__(f"{amounts[0]} needed in shared memory{what}; {remedy}")
        self.errno = errno.ENOSPC

    def held_here(self) -> Self:
        """Say that this process holds some of the room; return the error.

        Says nothing if the load is larger than the limit itself: nothing that goes makes room then.
        """
        most = getattr(self, "most", None)  # an older service sends none
        if most is None or self.needed <= most:
            # Pipelines refer to themselves: a dropped one stays until a collection.
            what, _, remedy = str(self).partition("; ")
            own = "in this process drop models, then call `gc.collect()` and load again"
            self.args = (f"{what}; {own}; or {remedy}",)
        return self

    def after(self, waited_s: float) -> Self:
        """Say also how long the load has waited for room, in seconds; return the error."""
        self.args = (
            f"{self}; loads that run may free some, but not within {waited_s:g} s "
            "(SHMLOAD_WAIT_TIMEOUT_S)",
        )
        return self


class SharedMemoryFull(CapacityError):
    """The file system at /dev/shm is too small."""


class MemoryLimitExceeded(CapacityError):
    """The memory of the machine, or of this process's control group, is too small."""


class ProcessLimitExceeded(CapacityError):
    """A limit of this process (`ulimit`) is too small for a load.

    Attributes:
        path: the file that was opened, written or loaded.
        limit: the limit, such as `RLIMIT_NOFILE`.
        available: its value.
    """

    def __init__(
        self, path: _Path, reason: str, remedy: str, limit: str, available: int, number: int
    ) -> None:
        self.path = path
        self.limit = limit
        self.available = available
        ShmloadError.__init__(self, f"{path}: {reason}; raise it with {remedy}")
        self.errno = number


class DoesNotFit(CapacityError):
    """A placement needs more memory on a device than the device has.

    Attributes:
        needed: size of what does not fit, in bytes.
        available: what is left on the device, in bytes.
        limit: the device.
        device_map: the closest map that fits, to pass instead; None if there is none.
    """

    def __init__(
        self,
        needed: int,
        available: int,
        limit: str,
        what: str,
        remedy: str,
        device_map: Mapping[str, str] | None = None,
    ) -> None:
        self.needed = needed
        self.available = available
        self.limit = limit
        self.device_map = dict(device_map) if device_map else None
        nearest = f" device_map={self.device_map}" if self.device_map else ""
        ShmloadError.__init__(self, f"{what}; {remedy}{nearest}")
        self.errno = errno.ENOMEM
