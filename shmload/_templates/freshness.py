"""Whether the files that a template has imported are still as they were.

To look at thousands of files takes longer than all else that a template does for a program. So
the kernel is asked to tell of changes (inotify), and they are looked at only after it has told of
any. Where it cannot tell, on network file systems, they are looked at each time.
"""

import contextlib
import ctypes
import os
import sys

from shmload._host.fingerprint import fingerprint
from shmload._host.procfs import file_system

_MASK = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""IN_MODIFY, ATTRIB, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF: inotify(7)."""
# File systems on which every change comes through this kernel.
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
# A new package there may change what a library does when it is imported.
_INSTALLED = ("site-packages", "dist-packages")
# Python imports these when it starts.
_AT_START = {"sitecustomize", "usercustomize"}


class Freshness:
    """Remembers how the files of all modules were, and what stood on the path."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._watch = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._is_watching = self._watch >= 0

    def begin(self) -> None:
        """Remember how all is now."""
        found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        # Some modules, such as torch.ops, name no real file.
        self._files = {file for file in found if isinstance(file, str) and os.path.isabs(file)}
        self._tops = {name.partition(".")[0] for name in sys.modules} | _AT_START
        folders = {*map(os.path.dirname, self._files), *filter(os.path.isdir, sys.path)}
        # A watched directory does not tell of what happens to its files under their other names.
        places = folders | set(filter(os.path.exists, self._files))
        # The watch begins first: no change is missed between the two.
        devices = {os.stat(place).st_dev for place in places}
        self._is_watching = (
            self._is_watching
            and all(map(_is_local, devices))
            and all(
                self._libc.inotify_add_watch(self._watch, os.fsencode(each), _MASK) >= 0
                for each in places  # as many as the user may have
            )
        )
        self._missing = [entry for entry in sys.path if not os.path.exists(entry)]
        self._before = self._look()

    def is_lost(self) -> bool:
        """Tell whether a file has changed since, or others are found on the path."""
        has_told = not self._is_watching or self._has_told()
        is_new = any(map(os.path.isdir, self._missing))
        return (has_told or is_new) and self._look() != self._before

    def _has_told(self) -> bool:
        has_told = False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._watch, 1 << 16):
                has_told = True
        return has_told

    def _look(self) -> tuple[object, ...]:
        names: list[set[str]] = []
        for entry in sys.path:
            listed: set[str] = set()
            with contextlib.suppress(OSError):
                listed = {each.partition(".")[0] for each in os.listdir(entry)}
            names.append(listed if entry.endswith(_INSTALLED) else listed & self._tops)
        return {file: _stamp_of(file) for file in self._files}, names


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    """Return size, inode and time of a file: a further hard link, as uv makes, is no change."""
    found = fingerprint(file)
    return found and (found.nbytes, found.inode, found.mtime_ns)


def _is_local(device: int) -> bool:
    """Tell whether every change of a file system comes through this kernel."""
    found = file_system(device)
    return found is not None and found.kind in _LOCAL
