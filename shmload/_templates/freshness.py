"""Whether the files that a template has imported are still as they were.

To look at thousands of files takes longer than all else that a template does for a program. So
the kernel is asked to tell of changes (inotify), and they are looked at only after it has told of
any. Where it cannot tell, on network file systems, they are looked at each time.
"""

import contextlib
import ctypes
import os
import sys
from stat import S_ISLNK

from shmload._host.fingerprint import Fingerprint, fingerprint
from shmload._host.procfs import file_system

_MASK = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""IN_MODIFY, ATTRIB, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF: inotify(7)."""
# File systems on which every change comes through this kernel.
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}


class Freshness:
    """Remembers how the files of all modules are now."""

    def __init__(self) -> None:
        self._files = _files()
        # A watched directory does not tell of what happens to its files under their other names.
        others = set(filter(_has_other_names, self._files))
        # The watch begins first: no change is missed between the two.
        self._watch = _watch({os.path.dirname(file) for file in self._files} | others)
        self._before = _fingerprints(self._files)
        self._changed = _fingerprints(set(sys.path))
        self._first = self._first_entries()

    def close(self) -> None:
        """End the watch."""
        if self._watch is not None:
            os.close(self._watch)
        self._watch = None

    def is_lost(self) -> bool:
        """Tell whether a file has changed since, or another one is found before it."""
        changed = _fingerprints(set(sys.path))
        if changed != self._changed:
            self._changed = changed
            if self._first_entries() != self._first:
                return True
        if self._watch is not None and not _has_told(self._watch):
            return False
        return _fingerprints(self._files) != self._before

    def _first_entries(self) -> dict[str, str]:
        """Return the first entry of the path that has each module of these files, by its name."""
        tops = {os.path.relpath(file, entry).split("/")[0] for file in self._files
                for entry in sys.path if file.startswith(f"{entry}/")}  # fmt: skip
        names = {name.partition(".")[0] for name in tops}
        found: dict[str, str] = {}
        for entry in sys.path:
            with contextlib.suppress(OSError):
                for name in {each.partition(".")[0] for each in os.listdir(entry)} & names:
                    found.setdefault(name, entry)
        return found


def _files() -> set[str]:
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Some modules, such as torch.ops, name no real file.
    return {file for file in found if isinstance(file, str) and os.path.isabs(file)}


def _fingerprints(files: set[str]) -> dict[str, Fingerprint | None]:
    return {file: fingerprint(file) for file in files}


def _has_other_names(file: str) -> bool:
    """Tell whether a file is a link, or has hard links, as those have that uv installs."""
    try:
        found = os.lstat(file)
    except OSError:
        return False
    return S_ISLNK(found.st_mode) or found.st_nlink > 1


def _watch(places: set[str]) -> int | None:
    """Have the kernel tell of changes in directories and files; None if it cannot for all.

    Returns:
        A descriptor, which can be read when something has changed.
    """
    above = {os.path.dirname(place) for place in places}
    try:
        devices = {os.stat(place).st_dev for place in places}
    except OSError:
        return None
    if not all((found := file_system(each)) and found.kind in _LOCAL for each in devices):
        return None
    libc = ctypes.CDLL(None)
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        return None
    for place in places | above:
        if libc.inotify_add_watch(fd, os.fsencode(place), _MASK) < 0 and place in places:
            os.close(fd)  # there are as many as the user may have
            return None
    return fd


def _has_told(watch: int) -> bool:
    has_told = False
    with contextlib.suppress(BlockingIOError):
        while os.read(watch, 1 << 16):
            has_told = True
    return has_told
