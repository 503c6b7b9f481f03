"""The imports of a template: the libraries, or what the user names, and what loads have kept.

A recall makes objects of the libraries' classes, and imports their modules first. A new Python, or
a template that has imported the libraries alone, needs a second for Stable Diffusion's.

A template is of use while the files that it has imported are as they were. To look at thousands of
files takes longer than all else that a template does for a program. So the kernel is asked to tell
of changes (inotify), and they are looked at only after it has told of any. Where it cannot tell, on
network file systems, they are looked at each time.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from stat import S_ISSOCK
from typing import Any

from shmload._host.collector import freeze
from shmload._host.procfs import file_system
from shmload._host.shm import SHM_DIR
from shmload._templates.hidden import Hidden

LOOK_S = 5.0
"""How often a template looks whether loads have kept more."""
# An import that has not ended by then never will; SIGALRM ends the process.
_TIMEOUT_S = 600
_THREADS_TIMEOUT_S = 2.0
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_NBYTES = 2 << 20
_NAMED = "SHMLOAD_RUN_IMPORTS"
_LIBRARIES = "torch,diffusers,transformers"
_STORED = "shmload._building.stored"
# A program that loads pipelines needs these next.
_OWN = ("shmload.integrations.loads", _STORED)
# A module of another package is imported by the program that needs it.
_PACKAGES = {*_LIBRARIES.split(","), "shmload"}
_MASK = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""IN_MODIFY, ATTRIB, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF: inotify(7)."""
# File systems on which every change comes through this kernel.
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
# A new package there may change what a library does when it is imported.
_INSTALLED = ("site-packages", "dist-packages")
# Python imports these when it starts.
_AT_START = {"sitecustomize", "usercustomize"}


class Unfit(Exception):
    """This process cannot be a template; str says why."""


def wanted_modules() -> list[str]:
    """Return the names of the modules that this process's variables ask for."""
    named = (os.environ.get(_NAMED) or _LIBRARIES).replace(",", " ").split()
    return [*named, *(_OWN if "diffusers" in named else ())]


class Imports:
    """Imports modules, which are hidden afterwards.

    Args:
        hidden: hides them.
    """

    def __init__(self, hidden: Hidden) -> None:
        self._hidden = hidden
        self._freshness = Freshness()
        self.descriptors: set[int] = set()
        """What the modules have opened."""
        self._tried: set[str] = set()
        self._changed_ns = -1
        self._looked = 0.0

    def make(self, wanted: Sequence[str], *, may_fail: bool = False) -> None:
        """Import modules, and remember how the files of all are now.

        Args:
            wanted: their names.
            may_fail: leave out those that cannot be imported.

        Raises:
            Unfit: this process cannot be a template any more.
            BaseException: a library has raised it.
        """
        signal.alarm(_TIMEOUT_S)
        before = _descriptors()
        with self._hidden.shown():
            for name in wanted:
                with contextlib.suppress(*([Exception] if may_fail else [])):
                    importlib.import_module(name)
            sys.stdout.flush()
            sys.stderr.flush()
            self._hidden.said = os.pread(1, os.fstat(1).st_size, 0)
            self.descriptors |= _descriptors() - before
            _require_fitness(self.descriptors)
            self._freshness.begin()
        gc.collect()
        freeze()
        _use_huge_pages()
        signal.alarm(0)

    def are_stale(self) -> bool:
        """Tell whether a new Python would import something else."""
        return self._freshness.is_lost()

    def make_kept(self) -> None:
        """Import what loads have kept, if there is more of that than before.

        It looks at most every `LOOK_S`, and only if something was made or removed since.

        Raises:
            Unfit: see `make`.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        changed_ns = os.stat(SHM_DIR).st_mtime_ns
        if changed_ns == self._changed_ns:
            return
        self._changed_ns = changed_ns
        found: set[str] = set()
        with self._hidden.shown(), contextlib.suppress(Exception):  # of another shmload, say
            stored: Any = sys.modules[_STORED]
            found = stored.modules_kept() - sys.modules.keys() - self._tried
        self._tried |= found
        if wanted := sorted(name for name in found if name.partition(".")[0] in _PACKAGES):
            self.make(wanted, may_fail=True)


def _require_fitness(descriptors: set[int]) -> None:
    """Check that copies of this process are sound, and have nothing that reaches another copy.

    Args:
        descriptors: what imports have opened.

    Raises:
        Unfit: it has more than one thread, has touched a GPU, or shares memory or a socket.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        if any(line.split(maxsplit=2)[1].startswith("rw-s") for line in lines):
            raise Unfit("an import has mapped memory that all programs would share")
    if any(S_ISSOCK(os.fstat(fd).st_mode) for fd in descriptors):
        raise Unfit("an import has opened a socket that all programs would share")
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Unfit("an import has touched the GPU")
    if len(os.listdir("/proc/self/task")) == 1:
        return
    pid = os.fork()  # OpenBLAS ends its threads before a fork, and starts them when it needs them
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            raise Unfit("an import has left threads running")
        time.sleep(0.001)


def _use_huge_pages() -> None:
    """Have the kernel map this process's memory by 2 MiB, if it can.

    A fork copies each entry of the page table: 2 ms instead of 14 ms with the libraries (two
    cores of a virtual machine, November 2026). A copy that writes copies 4 KiB as before.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in list(lines):
            places, rights, _, _, inode, *name = line.split()
            if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                low, high = (int(each, 16) for each in places.split("-"))
                low = -(-low // _HUGE_NBYTES) * _HUGE_NBYTES
                nbytes = max(0, high - low) // _HUGE_NBYTES * _HUGE_NBYTES
                libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), _MADV_COLLAPSE)


def _descriptors() -> set[int]:
    """Return the open descriptors of this process."""
    listed = map(int, os.listdir("/proc/self/fd"))
    return {fd for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}


# Whether files are still as they were -------------------------------------------------------------


class Freshness:
    """Remembers how the files of all modules were, and what stood on the path.

    It is made before the modules are imported: what changes meanwhile counts as changed.
    """

    def __init__(self) -> None:
        self._since_ns = time.time_ns()
        self._path = {entry: _names_in(entry) for entry in sys.path}
        # No directory tells that it is not the one of this name any more: a link on its way was
        # replaced, a directory above was renamed, or something was mounted.
        self._places = list(map(_place_of, self._path))
        self._files: dict[str, os.stat_result | None] = {}
        self._is_lost = False
        self._libc = ctypes.CDLL(None)
        self._watch = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._is_watching = self._watch >= 0

    def begin(self) -> None:
        """Remember how the modules' files are now that more are imported."""
        found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        # Some modules, such as torch.ops, name no real file; those of an archive name none.
        files = {file for file in found if isinstance(file, str) and os.path.isabs(file)}
        files.update(filter(os.path.isfile, self._path))
        self._tops = {name.partition(".")[0] for name in sys.modules} | _AT_START
        folders = filter(os.path.isdir, {*map(os.path.dirname, files), *self._path})
        # A watched directory does not tell of what happens to its files under their other names.
        places = {*folders, *filter(os.path.exists, files)}
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
        new = {file: _stat_of(file) for file in files - self._files.keys()}
        self._files.update(new)
        # A time to come was set by a clock that was wrong then; a file with further hard links, as
        # uv makes, gets another ctime whenever one of these comes or goes.
        span = range(self._since_ns + 1, time.time_ns() + 1)
        self._is_lost |= self._look() or any(
            each.st_mtime_ns in span or (each.st_nlink == 1 and each.st_ctime_ns in span)
            for each in new.values()
            if each
        )

    def is_lost(self) -> bool:
        """Tell whether a file has changed since, or others are found on the path."""
        has_told = not self._is_watching or self._has_told()
        is_other = list(map(_place_of, self._path)) != self._places
        return self._is_lost or ((has_told or is_other) and self._look())

    def _has_told(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._watch, 1 << 16))  # the next look takes more of it
        return False

    def _look(self) -> bool:
        """Look at all: tell whether a file or what stands on the path has changed."""
        for entry, before in self._path.items():
            changed = before ^ _names_in(entry)
            if not entry.endswith(_INSTALLED):
                changed = {name.partition(".")[0] for name in changed} & self._tops
            if changed:
                return True
        return any(_stamp_of(_stat_of(f)) != _stamp_of(old) for f, old in self._files.items())


def _names_in(entry: str) -> set[str]:
    """Return the names in a directory; none if there is no directory."""
    with contextlib.suppress(OSError):
        return set(os.listdir(entry)) - {"__pycache__"}
    return set()


def _place_of(entry: str) -> tuple[int, int] | None:
    """Return device and inode of what an entry of the path leads to."""
    found = _stat_of(entry)
    return found and (found.st_dev, found.st_ino)


def _stat_of(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.stat(path)
    return None


def _stamp_of(found: os.stat_result | None) -> tuple[int, ...] | None:
    """Return size, place and time of a file: a further hard link is no change."""
    return found and (found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns)


def _is_local(device: int) -> bool:
    """Tell whether every change of a file system comes through this kernel."""
    return file_system(device) in _LOCAL
