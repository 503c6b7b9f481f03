"""The errors of memory: its limits, its segments, and the directories that show them."""

import errno
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Self

from shmload._wording import format_nbytes, name_processes, nearest
from shmload.errors.sources import ShmloadError

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


class NoRoom(CapacityError):
    """A pipeline alone does not fit into a budget of a `Switcher`.

    Args:
        name: of the pipeline.
        needed: what it takes, in bytes.
        most: the budget, in bytes.
        limit: the argument that sets it: `budget` or `device_budget`.
    """

    def __init__(self, name: str, needed: int, most: int, limit: str) -> None:
        super().__init__(needed, most, limit, "", most=most)
        taken, given = format_nbytes(needed), format_nbytes(most)
        self.args = (f"{name} takes {taken}, but {limit} is {given}; raise {limit}",)


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


class SegmentError(ShmloadError):
    """A segment cannot be used."""


class SegmentNotFound(SegmentError, KeyError):
    """No resident model or segment matches.

    Args:
        what: the name, id or path.
        known: what it might have been meant for.
    """

    def __init__(self, what: str, known: Sequence[str] = ()) -> None:
        super().__init__(
            f"no resident model or segment matches {what!r}{nearest(what, known) or ';'} "
            "`shmload ls` lists them"
        )


class AmbiguousName(SegmentError, ValueError):
    """A part of a name fits several resident models.

    Attributes:
        candidates: the names, or ids, that it fits.
    """

    def __init__(self, what: str, candidates: Iterable[str]) -> None:
        self.candidates = tuple(candidates)
        super().__init__(
            f"{what!r} fits several: {', '.join(self.candidates)}; give more of the name, or an id "
            "from `shmload ls --long`"
        )


class SegmentBusy(SegmentError):
    """A process or a publication uses a segment, so it was not removed.

    Attributes:
        names: names of the segments that are in use.
        removed: names of the other segments of this request, which were removed.

    Args:
        pids: the processes that use each segment, by its name.
        removed: as the attribute.
        models: what to call the segments' models, by segment.
        publications: the publications that need each segment, by its name.
    """

    def __init__(
        self,
        pids: Mapping[str, Collection[int]],
        removed: Iterable[str] = (),
        models: Mapping[str, str] | None = None,
        publications: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        publications = publications or {}
        self.names = tuple(dict.fromkeys((*pids, *publications)))
        self.removed = tuple(removed)
        by_model: dict[str, set[int]] = {}
        for name, by in pids.items():
            by_model.setdefault((models or {}).get(name, name), set()).update(by)
        held = [f"{name} by {name_processes(by)}" for name, by in by_model.items()]
        needing: dict[str, set[str]] = {}
        for name, by_name in publications.items():
            needing.setdefault((models or {}).get(name, name), set()).update(by_name)
        for name, of_model in needing.items():
            noun = "publication" if len(of_model) == 1 else "publications"
            held.append(f"{name} by the {noun} {', '.join(sorted(of_model))}")
        rest = f" ({len(self.removed)} removed)" if self.removed else ""
        remedies = ["end that process, or evict later"] if pids else []
        if any(os.getpid() in by for by in pids.values()):
            # Pipelines refer to themselves: a dropped one stays until a collection.
            remedies = ["in this process drop the models, then call `gc.collect()` and evict again"]
        for source in sorted({each for several in publications.values() for each in several}):
            remedies.append(f"`shmload rm {shlex.quote(source)}`")
        super().__init__(f"still in use: {', '.join(held)}; {', or '.join(remedies)}{rest}")


class NotPublishable(SegmentError):
    """A part of a pipeline or model cannot be published.

    Args:
        source: the publication's name, as `shm:NAME`.
        reason: the path of the part, and what is wrong with it.
        remedy: what to do first; empty if that is not known.
    """

    def __init__(self, source: str, reason: str, remedy: str = "") -> None:
        first = f"; {remedy}, and publish again" if remedy else ""
        super().__init__(f"{source} cannot be published: {reason}{first}")


class UpdateRefused(SegmentError):
    """The weights of a pipeline or model cannot become those of a source; none has changed.

    Args:
        source: what they were to become.
        reason: what differs, by its path.
        remedy: what to do instead.
    """

    def __init__(self, source: str, reason: str, remedy: str = "load it instead") -> None:
        super().__init__(f"not updated to {source}: {reason}; {remedy}")


class PublicationBroken(SegmentError):
    """A publication cannot be loaded here.

    Args:
        source: its name, as `shm:NAME@1`.
        reason: what is wrong.
    """

    def __init__(self, source: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{source} cannot be loaded: {reason}; publish it again, in an environment like this"
        )


class SegmentCorrupt(SegmentError):
    """A segment's bytes do not match the digest in its header."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"segment {name} is corrupt: {reason}; remove it with `shmload rm {name}`")


class SegmentRemoved(SegmentError):
    """A segment's name was removed from outside while it was being decoded."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"/dev/shm/{name} was removed while it was being decoded; load again. If no one ran "
            "`rm`, systemd did (RemoveIPC= in logind.conf) when the user's last session ended: "
            "`loginctl enable-linger` prevents it"
        )


class SegmentUntrusted(SegmentError):
    """A name in /dev/shm belongs to another user or is not a plain private file."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"/dev/shm/{name} is not trusted: {reason}; ask its owner to remove it")


class SharedMemoryUnusable(SegmentError, OSError):
    """/dev/shm is missing, is no directory, or may not be read or written.

    Args:
        number: the kernel's number of the error.
    """

    def __init__(self, number: int | None) -> None:
        self.errno = number
        super().__init__(
            f"/dev/shm cannot be used: {os.strerror(number or errno.EIO)}; mount a file system of "
            "memory there that every user may write: `mount -t tmpfs -o mode=1777 tmpfs /dev/shm`"
        )


class SwitchTimeout(ShmloadError, TimeoutError):
    """A pipeline of a `Switcher` could not be had in time: others were used all the while."""

    def __init__(self, name: str, timeout_s: float, used: Iterable[str]) -> None:
        self.name = name
        super().__init__(
            f"{name} waited {timeout_s:g} s for {', '.join(sorted(used))}, which are in use; end "
            "their `with` blocks, or raise SHMLOAD_WAIT_TIMEOUT_S"
        )


class SegmentTimeout(SegmentError, TimeoutError):
    """Another process is still decoding or changing the wanted segment after the deadline.

    Args:
        doing: what the other process does to it; None for a decode.
        pids: process ids of the others, as far as they are known.
    """

    def __init__(
        self, name: str, timeout_s: float, doing: str | None = None, pids: Collection[int] = ()
    ) -> None:
        self.name = name
        by = name_processes(pids) if pids else "another process"
        remedy = "end that process" if doing else "raise SHMLOAD_WAIT_TIMEOUT_S or end that process"
        super().__init__(
            f"segment {name} is still being {doing or 'decoded'} by {by} "
            f"after {timeout_s:g} s; {remedy}"
        )


class ViewRefused(ShmloadError, OSError):
    """A view directory cannot be made at its place.

    Args:
        path: the place, or the file in it that is in the way.
        reason: what is wrong, and what to do about it.
    """

    def __init__(self, path: _Path, reason: str) -> None:
        self.path = fspath(path)
        super().__init__(f"{self.path}: {reason}")
