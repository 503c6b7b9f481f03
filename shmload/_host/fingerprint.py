"""Whether a file is still what it was.

Guarantee: a file that was written to or replaced since has another fingerprint, whatever size and
times it was given: no program sets the time at which the kernel has changed an inode. Not so a
write through a shared mapping to a page that was written to before: the kernel notes no time. Links
are followed, as loads follow them. Templates import this module, so it imports little.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple, Self

Stamp = tuple[int, int, int, int]
"""A fingerprint that can be compared after a boot."""


class Fingerprint(NamedTuple):
    """What stat says of a file, as far as a change of the file changes it."""

    nbytes: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """Return the fingerprint in what stat has said of a file."""
        return cls(found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def place(self) -> tuple[int, int]:
        """Device and inode: what two names of one file have in common."""
        return self.device, self.inode


def fingerprint(path: str | os.PathLike[str]) -> Fingerprint | None:
    """Return the fingerprint of what a path leads to; None if there is nothing."""
    try:
        return Fingerprint.of(os.stat(path))
    except OSError:
        return None


def files_below(folder: str | os.PathLike[str]) -> dict[str, Fingerprint | None]:
    """Return the fingerprint of each file below a folder, by its path.

    Folders that are links are entered, too, each folder once: a further name of it stands in the
    result itself. So does a link to nothing, with None.
    """
    return dict(_walk(os.fspath(folder), set()))


def _walk(folder: str, entered: set[tuple[int, int]]) -> Iterator[tuple[str, Fingerprint | None]]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        found = fingerprint(path)
        if found and found.place not in entered and os.path.isdir(path):
            entered.add(found.place)
            yield from _walk(path, entered)
        else:
            yield path, found
