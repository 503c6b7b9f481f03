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

from shmload._host.fingerprint import fingerprint
from shmload._host.procfs import file_system

_MASK = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""IN_MODIFY, ATTRIB, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF: inotify(7)."""
# File systems on which every change comes through this kernel.
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}


class Freshness:
    """Remembers how the files of all modules are now, and what stands on the path."""

    def __init__(self) -> None:
        found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        # Some modules, such as torch.ops, name no real file.
        self._files = {file for file in found if isinstance(file, str) and os.path.isabs(file)}
        self._tops = {name.partition(".")[0] for name in sys.modules}
        # The watch begins first: no change is missed between the two.
        places = {*map(os.path.dirname, self._files), *filter(os.path.isdir, sys.path)}
        # A watched directory does not tell of what happens to its files under their other names.
        self._watch = _watch(places | set(filter(_has_other_names, self._files)))
        self._missing = [entry for entry in sys.path if not os.path.exists(entry)]
        self._before = self._look()

    @property
    def descriptors(self) -> set[int]:
        """What it has open."""
        return set() if self._watch is None else {self._watch}

    def close(self) -> None:
        """End the watch."""
        for fd in self.descriptors:
            os.close(fd)
        self._watch = None

    def is_lost(self) -> bool:
        """Tell whether a file has changed since, or another one is found before it."""
        has_told = self._watch is None or _has_told(self._watch)
        is_new = any(os.path.isdir(entry) for entry in self._missing)
        return (has_told or is_new) and self._look() != self._before

    def _look(self) -> tuple[object, object]:
        first: dict[str, str] = {}
        for entry in sys.path:
            with contextlib.suppress(OSError):
                for name in {each.partition(".")[0] for each in os.listdir(entry)} & self._tops:
                    first.setdefault(name, entry)
        return {file: _stamp_of(file) for file in self._files}, first


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    """Return size, inode and time of a file: a further hard link, as uv makes, is no change."""
    found = fingerprint(file)
    return found and (found.nbytes, found.inode, found.mtime_ns)


def _has_other_names(file: str) -> bool:
    """Tell whether a file is a link, or has hard links, as those have that uv installs."""
    with contextlib.suppress(OSError):
        found = os.lstat(file)
        return S_ISLNK(found.st_mode) or found.st_nlink > 1
    return False


def _watch(places: set[str]) -> int | None:
    """Have the kernel tell of changes in directories; None if it cannot for all.

    Returns:
        A descriptor, which can be read when something has changed.
    """
    try:
        devices = {os.stat(place).st_dev for place in places}
    except OSError:
        return None
    if not all((found := file_system(each)) and found.kind in _LOCAL for each in devices):
        return None
    libc = ctypes.CDLL(None)
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    for place in places if fd >= 0 else ():
        if libc.inotify_add_watch(fd, os.fsencode(place), _MASK) < 0:
            os.close(fd)  # there are as many as the user may have
            return None
    return fd if fd >= 0 else None


def _has_told(watch: int) -> bool:
    has_told = False
    with contextlib.suppress(BlockingIOError):
        while os.read(watch, 1 << 16):
            has_told = True
    return has_told
