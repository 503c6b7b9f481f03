"""The register of view directories: which there are, from what they were made, what they need.

One small file for each directory, in the user's state directory. Each is written as a whole; what a
process that dies leaves is found in it and finished or undone by `_segments.standing_views`.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shmload._host.files import replacing
from shmload._host.owned import open_folder, read_own
from shmload._segments.metadata import decode_paths, encode_paths
from shmload._segments.names import wait_turn
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import ViewBusy, ViewUnwritable

logger = logger_of(__name__)

_SUFFIX = ".json"


class ViewArguments(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a view directory is made of; equal exactly if the directory would be the same."""

    source: str
    """An absolute path, or the id of a model on the hub."""
    dtype: str | dict[str, str | None] | None = None
    """torch's name of a dtype, or these by component."""
    components: tuple[str, ...] | None = None
    variant: str | None = None
    subfolder: str | None = None
    weight_name: tuple[str, ...] = ()
    revision: str | None = None
    cache_dir: str | None = None


class ViewRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A view directory as it was built; it lies in the directory too, as its marker."""

    directory: str
    """Where it was built, absolute and without links."""
    arguments: ViewArguments
    build: str
    """A random text that no other build has."""
    made_at: float
    """Seconds since the epoch."""
    segments: tuple[str, ...]
    nbytes: int
    """Total size of the segments."""
    links: dict[str, str]
    """What each link leads to, by its path in the directory."""
    copies: dict[str, str]
    """The fingerprint of the original of each copied file, by its path in the directory."""


class ViewEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the register says of one directory."""

    directory: str
    standing: ViewRecord | None = None
    """What is there; None while the first build is under way."""
    pending: ViewRecord | None = None
    """What is being built."""
    staging: str = ""
    """Where it is built, or where the old one is taken down; empty if nothing is under way."""

    @property
    def is_removed(self) -> bool:
        """Whether the directory is being removed."""
        return bool(self.staging) and self.pending is None

    @property
    def needed(self) -> set[str]:
        """The segments that are pinned for it."""
        records = (self.standing, self.pending)
        return {name for record in records if record for name in record.segments}


def view_entries() -> list[ViewEntry]:
    """Return all entries, in the order of their directories; an unreadable one with a warning."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(_folder()):
            if name.endswith(_SUFFIX):
                entry = _read(_folder() / name)
                if entry:
                    found.append(entry)
    return sorted(found, key=lambda entry: entry.directory)


def read_entry(directory: str) -> ViewEntry:
    """Return a directory's entry; an empty one if there is none."""
    return _read(_path(directory)) or ViewEntry(directory=directory)


def write_entry(entry: ViewEntry) -> None:
    """Write a directory's entry; remove it if it says nothing.

    Raises:
        ViewUnwritable: the state directory cannot be written.
    """
    path = _path(entry.directory)
    try:
        if entry == ViewEntry(directory=entry.directory):
            path.unlink(missing_ok=True)
            return
        open_folder(path.parent, make=True).close()
        with replacing(path, durable=True, mode=0o600) as file:
            file.write(encode_paths(entry))
    except OSError as exc:
        raise _unwritable(path, exc) from exc


def views_by_segment() -> dict[str, tuple[str, ...]]:
    """Return the view directories that need each segment, by segment."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in view_entries():
        for name in entry.needed:
            found[name] = (*found.get(name, ()), entry.directory)
    return found


@contextlib.contextmanager
def changing_view(directory: str, timeout_s: float) -> Iterator[None]:
    """Be the one process that builds or removes a directory, inside the block.

    Args:
        directory: absolute and without links.
        timeout_s: how long to wait for another process, in seconds.

    Raises:
        ViewBusy: another process does that.
        ViewUnwritable: the state directory cannot be written.
        SharedMemoryFull: /dev/shm has no inodes left.
    """
    try:
        open_folder(_folder(), make=True).close()  # before a load that it would be too late for
    except OSError as exc:
        raise _unwritable(_folder(), exc) from exc
    with wait_turn(f"stand-{_key(directory)}", timeout_s) as is_mine:
        if not is_mine:
            raise ViewBusy(directory, timeout_s)
        yield


def _read(path: Path) -> ViewEntry | None:
    try:
        with open_folder(path.parent) as folder:
            return decode_paths(read_own(path.name, folder), ViewEntry)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as exc:
        logger.warning("%s is left alone, as it cannot be read: %s", path, exc)
        return None


def _unwritable(path: Path, exc: OSError) -> ViewUnwritable:
    remedy = "choose another place for it with SHMLOAD_STATE_DIR"
    return ViewUnwritable(path, exc.strerror or str(exc), remedy)


def _folder() -> Path:
    return settings().state_dir / "views"


def _path(directory: str) -> Path:
    return _folder() / (_key(directory) + _SUFFIX)


def _key(directory: str) -> str:
    return hashlib.blake2b(os.fsencode(directory), digest_size=15).hexdigest()
