"""The errors of view directories."""

import shlex
from collections.abc import Iterable, Sequence
from os import PathLike, fspath

from shmload._wording import nearest
from shmload.errors.base import ShmloadError
from shmload.errors.segments import SegmentError

_Path = str | PathLike[str]


class ViewError(ShmloadError):
    """A view directory cannot be made, changed or removed."""


class ViewRefused(ViewError, FileExistsError):
    """There is something else at the place of a view directory.

    Args:
        directory: the place.
        reason: what is there, and what to do about it.
    """

    def __init__(self, directory: _Path, reason: str) -> None:
        self.directory = fspath(directory)
        super().__init__(f"{self.directory}: {reason}")


class ViewNotFound(ViewError, FileNotFoundError):
    """A directory is no view directory."""

    def __init__(self, directory: _Path, known: Sequence[str] = ()) -> None:
        self.directory = fspath(directory)
        super().__init__(
            f"{self.directory} is no view directory{nearest(self.directory, known) or ';'} "
            "`shmload view --list` lists them"
        )


class ViewUnwritable(ViewError, OSError):
    """A view directory, or the record of it, cannot be written."""

    def __init__(self, path: _Path, reason: str, remedy: str) -> None:
        self.path = fspath(path)
        super().__init__(f"{self.path} cannot be written: {reason}; {remedy}")


class ViewBusy(ViewError, TimeoutError):
    """Another process is still making or removing a view directory after the deadline."""

    def __init__(self, directory: _Path, timeout_s: float) -> None:
        self.directory = fspath(directory)
        super().__init__(
            f"{self.directory} is still being changed by another process after {timeout_s:g} s; "
            "raise SHMLOAD_WAIT_TIMEOUT_S or end that process"
        )


class SegmentProtected(SegmentError):
    """Segments stay pinned because a view directory uses them.

    Attributes:
        names: of the segments.
        directories: the view directories.
    """

    def __init__(self, names: Iterable[str], directories: Sequence[str]) -> None:
        self.names = tuple(names)
        self.directories = tuple(directories)
        remedies = " and ".join(
            f"`shmload view --remove {shlex.quote(each)}`" for each in self.directories
        )
        super().__init__(
            f"still pinned, for the view director{'y' if len(self.directories) == 1 else 'ies'} "
            f"{', '.join(self.directories)}; {remedies} ends that"
        )
