"""The errors of segments."""

import errno
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from shmload._wording import name_processes, nearest
from shmload.errors.base import ShmloadError


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
    """A process or a view directory still uses a segment, so the segment was not removed.

    Attributes:
        names: names of the segments that are in use.
        removed: names of the other segments of this request, which were removed.

    Args:
        pids: the processes that use each segment, by its name.
        removed: as the attribute.
        models: what to call the segments' models, by segment.
        views: the view directories that need each segment, by its name.
    """

    def __init__(
        self,
        pids: Mapping[str, Collection[int]],
        removed: Iterable[str] = (),
        models: Mapping[str, str] | None = None,
        views: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        views = views or {}
        self.names = (*pids, *(name for name in views if name not in pids))
        self.removed = tuple(removed)
        by_model: dict[str, set[int]] = {}
        for name, by in pids.items():
            by_model.setdefault((models or {}).get(name, name), set()).update(by)
        held = [f"{name} by {name_processes(by)}" for name, by in by_model.items()]
        by_view: dict[str, set[str]] = {}
        for name, directories in views.items():
            by_view.setdefault((models or {}).get(name, name), set()).update(directories)
        for name, of_model in by_view.items():
            noun = "directory" if len(of_model) == 1 else "directories"
            held.append(f"{name} by the view {noun} {', '.join(sorted(of_model))}")
        rest = f" ({len(self.removed)} removed)" if self.removed else ""
        remedies = ["end that process, or evict later"] if pids else []
        if any(os.getpid() in by for by in pids.values()):
            # Pipelines refer to themselves: a dropped one stays until a collection.
            remedies = ["in this process drop the models, then call `gc.collect()` and evict again"]
        for directory in sorted({each for several in views.values() for each in several}):
            remedies.append(f"`shmload view --remove {shlex.quote(directory)}`")
        super().__init__(f"still in use: {', '.join(held)}; {', or '.join(remedies)}{rest}")


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
