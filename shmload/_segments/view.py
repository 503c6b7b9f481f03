"""A directory that looks like a checkpoint and whose weight files are segments.

Everything else in it is a link to the original, so any code that reads a checkpoint from a path
reads this one. A segment is a safetensors file, and has the name of one whatever its shard's format
is. The directory lies in /dev/shm because some libraries split whole paths at dots (diffusers, old
sharded variants), and a temporary directory's path may have one.
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

from shmload._checkpoints.indexes import indexed_shards, renamed_index
from shmload._checkpoints.weights import name_as_safetensors
from shmload._host.descriptors import Descriptor
from shmload._host.linux import SHM_DIR, no_inodes, try_lock
from shmload._segments.names import make_view_name, view_names
from shmload.errors import CheckpointError

# On a view's directory: that it has had its lock, so without one its process has died.
_MARK = stat.S_ISVTX
# A view is a directory for a moment before it has its lock and its mark.
_GRACE_S = 60.0


class View:
    """A directory of links; a context that removes it.

    Its own lock, held by this process, tells `collect_garbage` that it is in use.

    Args:
        root: the directory, or the single file, to look like.
        files: where each weight file's bytes are instead, by its path below `root`.

    Attributes:
        path: of the directory, or of the file in it, to give to a library.
    """

    def __init__(self, root: Path, files: Mapping[Path, Path]) -> None:
        self.folder = SHM_DIR / make_view_name()
        self._lock = Descriptor(-1)
        self._made: list[Path] = []
        root = _absolute(root)
        try:
            self._make_folder(self.folder)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._lock = Descriptor(os.open(self.folder, flags))
            try_lock(self._lock.fd, exclusive=True)
            os.fchmod(self._lock.fd, 0o700 | _MARK)
            # A link is followed from where it lies, so it must not lead to a relative path.
            paths = {_absolute(path): _absolute(to) for path, to in files.items()}
            self.path = self._link(root, paths)
        except BaseException as exc:
            self.close()
            if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
                raise no_inodes() from exc
            raise

    def _link(self, root: Path, files: Mapping[Path, Path]) -> Path:
        """Fill the directory and return the path that stands for the root."""
        path = self.folder
        if not root.is_dir():
            path /= name_as_safetensors(root.name) if root in files else root.name
            self._make_link(path, files.get(root, root))
            return path
        if root.parent.name == "snapshots":
            # transformers reads a commit's hash off the path of a file in a hub cache.
            for name in ("snapshots", root.name):
                path /= name
                self._make_folder(path)
        self._mirror(root, path, files)
        return path

    def _mirror(self, source: Path, target: Path, files: Mapping[Path, Path]) -> None:
        """Link every entry; only directories with a replaced file are made anew."""
        folders = {parent for file in files for parent in file.parents}
        renamed = {name_as_safetensors(file.name) for file in files if file.parent == source}
        with os.scandir(source) as entries:
            for entry in entries:
                path = Path(entry.path)
                link = target / entry.name
                if path in folders:
                    self._make_folder(link)
                    self._mirror(path, link, files)
                elif path in files:
                    self._make_link(link.with_name(name_as_safetensors(entry.name)), files[path])
                elif _is_index_of_renamed(path, files):
                    index = renamed_index(path, name_as_safetensors)
                    self._write(link.with_name(name_as_safetensors(entry.name)), index)
                elif entry.name not in renamed:
                    self._make_link(link, path)

    def _make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        self._made.append(path)

    def _make_link(self, path: Path, target: Path) -> None:
        path.symlink_to(target)
        self._made.append(path)

    def _write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        self._made.append(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory; again is fine. What was mapped through it stays mapped."""
        # One by one: rmtree takes descriptors, and a process may have run out of them.
        while self._made:
            path = self._made.pop()
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)  # what a library has put there
        self._lock.close()


def descriptor_path(fd: int) -> Path:
    """Return a path that opens the very file a descriptor of this process holds.

    Unlike its name this works before the file has its final name and after it has none.
    """
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def dead_views() -> list[str]:
    """Return the names of the views whose processes have died."""
    return list(filter(_is_dead, view_names()))


def remove_dead_views() -> list[str]:
    """Remove the views whose processes have died, and return the names."""
    return list(filter(_remove_if_dead, view_names()))


def _absolute(path: Path) -> Path:
    """Return the path from the root on; links in it stay what they are."""
    return Path(os.path.abspath(path))


def _is_index_of_renamed(path: Path, files: Mapping[Path, Path]) -> bool:
    """Tell whether an index lists replaced files, which have other names in the view."""
    if ".index." not in path.name or name_as_safetensors(path.name) == path.name:
        return False
    try:
        shards = indexed_shards(path)
    except CheckpointError:  # not the one that was loaded
        return False
    return bool(shards) and files.keys() >= set(shards)


def _is_dead(name: str) -> bool:
    with _hold_dead(name) as is_mine:
        return is_mine


def _remove_if_dead(name: str) -> bool:
    with _hold_dead(name) as is_mine:
        if is_mine:
            shutil.rmtree(SHM_DIR / name, ignore_errors=True)
    return is_mine


@contextlib.contextmanager
def _hold_dead(name: str) -> Iterator[bool]:
    """Lock a view; yields whether it belongs to this user and its process has died."""
    try:
        fd = os.open(SHM_DIR / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        found = os.fstat(fd)
        # One from the future is old: the clock was set back.
        is_new = 0 <= time.time() - found.st_mtime < _GRACE_S
        is_young = is_new and not found.st_mode & _MARK
        is_ours = found.st_uid == os.geteuid()
        yield is_ours and not is_young and try_lock(fd, exclusive=True)
    finally:
        os.close(fd)
