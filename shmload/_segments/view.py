"""A view: a directory that looks like a checkpoint and whose weight files are segments.

Every other file in it is a link to the original, so code that reads a checkpoint from a path can
read a view. A segment is a safetensors file, and its link has the name of one whatever the shard's
format is. Views lie in /dev/shm because some libraries split whole paths at dots (diffusers, old
sharded variants), and the path of a temporary directory may have a dot.
"""

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import msgspec

from shmload._checkpoints.formats.known import name_alone_in_view, name_in_view
from shmload._checkpoints.indexes import indexed_shards, renamed_index
from shmload._host.descriptors import Descriptor, try_lock
from shmload._host.shm import SHM_DIR, no_inodes
from shmload._segments.names import make_view_name, view_names
from shmload.errors import CheckpointError

# Set on a view's directory once it is locked: a marked view without a lock has a dead process.
_MARK = stat.S_ISVTX
# A new view has neither lock nor mark for a moment; an unmarked one counts as dead after this many
# seconds.
_GRACE_S = 60.0


class Entries(msgspec.Struct, frozen=True):
    """The entries of a directory that looks like another one, by their path in it."""

    folders: list[str]
    """Each after those above it."""
    links: dict[str, Path]
    """What each link leads to."""
    files: dict[str, bytes]
    """What is written to each file: indexes, which name shards as the links do."""


def entries_like(root: Path, files: Mapping[Path, Path]) -> Entries:
    """Plan a directory that looks like another one; writes nothing.

    Every entry is a link; only the directories that contain a replaced file are directories.

    Args:
        root: the directory, or the single file, to look like; absolute.
        files: for each weight file below `root`, the path of the file with its bytes.

    Raises:
        CheckpointError: an index cannot be read.
    """
    shown = Entries([], {}, {})
    # A relative target would be resolved from the link's own directory.
    replaced = {absolute(path): absolute(to) for path, to in files.items()}
    if not root.is_dir():
        name = name_alone_in_view(root.name) if root in replaced else root.name
        shown.links[name] = replaced.get(root, root)
        return shown
    above = {parent for file in replaced for parent in file.parents}
    folders = [root]
    for folder in folders:
        renamed = {name_in_view(file.name) for file in replaced if file.parent == folder}
        for name in os.listdir(folder):
            path = folder / name
            place = str(path.relative_to(root))
            place_in_view = str(path.with_name(name_in_view(name)).relative_to(root))
            if path in above:
                shown.folders.append(place)
                folders.append(path)
            elif path in replaced:
                shown.links[place_in_view] = replaced[path]
            elif _is_index_of_renamed(path, replaced):
                shown.files[place_in_view] = renamed_index(path, name_in_view)
            elif name not in renamed:
                shown.links[place] = path
    return shown


class View:
    """A directory of links; a context that removes it.

    This process holds the directory's lock, so that `collect_garbage` leaves it.

    Args:
        root: the directory, or the single file, that the view looks like.
        files: for each weight file below `root`, the path of the file with its bytes.

    Attributes:
        path: of the directory, or of the file in it, for a library to read.
    """

    def __init__(self, root: Path, files: Mapping[Path, Path]) -> None:
        self.folder = SHM_DIR / make_view_name()
        self._lock = Descriptor(-1)
        self._made: list[Path] = []
        root = absolute(root)
        try:
            self._make_folder(self.folder)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._lock = Descriptor(os.open(self.folder, flags))
            try_lock(self._lock.fd, exclusive=True)
            os.fchmod(self._lock.fd, 0o700 | _MARK)
            self.path = self._link(root, files)
        except BaseException as exc:
            self.close()
            if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
                raise no_inodes() from exc
            raise

    def _link(self, root: Path, files: Mapping[Path, Path]) -> Path:
        """Create the links and return the path that replaces the root."""
        path, shown = self.folder, entries_like(root, files)
        above: tuple[str, ...] = ()
        if root.is_dir() and root.parent.name == "snapshots":
            # transformers takes the commit's hash from the path of a file in a hub cache.
            above = ("snapshots", root.name)
        elif any(root.glob("*.py")):
            # It names the modules of a repository's code after its directory.
            above = (root.name,)
        for name in above:
            path /= name
            self._make_folder(path)
        for name in shown.folders:
            self._make_folder(path / name)
        for name, target in shown.links.items():
            (path / name).symlink_to(target)
            self._made.append(path / name)
        for name, content in shown.files.items():
            self._made.append(path / name)
            (path / name).touch(mode=0o600)
            (path / name).chmod(0o600)  # a umask may have cleared bits
            (path / name).write_bytes(content)
        return path if root.is_dir() else path / next(iter(shown.links))

    def _make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        self._made.append(path)
        path.chmod(0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory; what was mapped through it stays mapped. May be called again."""
        # One by one: rmtree needs descriptors, and this process may have run out of them.
        while self._made:
            path = self._made.pop()
            with contextlib.suppress(OSError):
                # The link first: to ask what it leads to could hang on a dead network disk.
                path.rmdir() if not path.is_symlink() and path.is_dir() else path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)  # files that a library has put there
        self._lock.close()


def descriptor_path(fd: int) -> Path:
    """Return a path that opens the same file as a descriptor of this process.

    It works before the file has its final name and after it has lost it.
    """
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def dead_views() -> list[str]:
    """Return the names of the views whose processes have died."""
    return list(_hold_dead())


def remove_dead_views() -> list[str]:
    """Remove the views whose processes have died, and return the names."""
    removed = []
    for name in _hold_dead():
        shutil.rmtree(SHM_DIR / name, ignore_errors=True)
        removed.append(name)
    return removed


def _hold_dead() -> Iterator[str]:
    """Yield the names of this user's views whose processes have died, each while it is locked."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for name in view_names():
        try:
            view = Descriptor(os.open(SHM_DIR / name, flags))
        except OSError:
            continue
        with view:
            found = os.fstat(view.fd)
            # A time in the future means that the clock was set back: count the view as old.
            is_new = 0 <= time.time() - found.st_mtime < _GRACE_S
            is_young = is_new and not found.st_mode & _MARK
            is_ours = found.st_uid == os.geteuid()
            if is_ours and not is_young and try_lock(view.fd, exclusive=True):
                yield name


def absolute(path: Path) -> Path:
    """Return the absolute path, with links in it unresolved."""
    return Path(os.path.abspath(path))


def _is_index_of_renamed(path: Path, files: Mapping[Path, object]) -> bool:
    """Tell whether an index lists replaced files, which have other names in the view."""
    if ".index." not in path.name or name_in_view(path.name) == path.name:
        return False
    try:
        shards = indexed_shards(path)
    except CheckpointError:  # not the one that was loaded
        return False
    return bool(shards) and files.keys() >= set(shards)
