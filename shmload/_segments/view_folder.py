"""The files of a view directory: built beside its place, put there in one step, taken down.

Guarantee: at its place there is a complete view directory or what was there before; the two moments
without either, where the file system cannot exchange names, are mended by the next change. Files
that shmload did not make are never removed.
"""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shmload._host.files import exchange_names
from shmload._host.owned import belongs_here
from shmload._segments.metadata import decode_paths, encode_paths
from shmload._segments.view_register import ViewRecord
from shmload.errors import ViewRefused, ViewUnwritable

MARKER = ".shmload-view"
"""The file in a view directory that says that it is one."""

_STAGING = ".shmload-view-"
_ASIDE = "-old"


class Copied(msgspec.Struct, frozen=True):
    """A file that a view directory has a copy of."""

    original: Path
    stamp: str
    """The same as long as the original, and what is written instead of it, is."""
    content: bytes | None = None
    """What to write instead of its own bytes; None for those."""


def staging_for(directory: str) -> str:
    """Return a new path beside a directory, to build in."""
    return os.path.join(os.path.dirname(directory), _STAGING + secrets.token_hex(8))


def read_marker(directory: str) -> ViewRecord | None:
    """Return what a view directory says of itself; None if it is none of this user.

    It may have come in an archive of somebody's. So it may name nothing outside of the directory.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(os.path.join(directory, MARKER), flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not belongs_here(found) or not stat.S_ISREG(found.st_mode):
                return None
            record = decode_paths(file.read(), ViewRecord)
    except (OSError, ValueError):
        return None
    return record if all(map(_is_inside, (*record.links, *record.copies))) else None


def _is_inside(path: str) -> bool:
    """Tell whether a path of a record stays in its directory."""
    return not os.path.isabs(path) and ".." not in path.split("/")


def is_intact(record: ViewRecord) -> bool:
    """Tell whether a directory still has every file that it was built with, and is where it was."""
    here = read_marker(record.directory)
    if not here or here.build != record.build or here.directory != record.directory:
        return False
    root = Path(record.directory)
    try:
        has_links = all(os.readlink(root / path) == to for path, to in record.links.items())
    except OSError:
        return False
    return has_links and all((root / path).is_file() for path in record.copies)


def stage(staging: str, record: ViewRecord, copies: Mapping[str, Copied]) -> None:
    """Build a view directory at a new path.

    Args:
        staging: the path, from `staging_for`.
        record: what to build; written first, so that `take_down` knows what is whose.
        copies: the files to copy, by their path in the directory.

    Raises:
        ViewUnwritable: a file cannot be read or written.
    """
    root = Path(staging)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir()
        _write(root / MARKER, encode_paths(record))
        for path, copied in copies.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            content = copied.content
            _write(root / path, copied.original.read_bytes() if content is None else content)
            found = os.stat(copied.original)
            os.utime(root / path, ns=(found.st_atime_ns, found.st_mtime_ns))
        for path, target in record.links.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
    except OSError as exc:
        raise _unwritable(exc, record.directory) from exc


def put_in_place(staging: str, directory: str) -> None:
    """Give a staged view directory its name; what was there goes to the staging path.

    Raises:
        ViewRefused: something that is no view directory has got the name meanwhile.
        ViewUnwritable: the file system refuses.
    """
    try:
        if not os.path.lexists(directory):
            os.rename(staging, directory)
        elif not read_marker(directory):
            raise ViewRefused(directory, "it has been made meanwhile; choose another place")
        elif not exchange_names(staging, directory):
            aside = staging + _ASIDE
            os.rename(directory, aside)
            os.rename(staging, directory)
            os.rename(aside, staging)
    except OSError as exc:
        if isinstance(exc, ViewRefused):
            raise
        raise _unwritable(exc, directory) from exc


def bring_back(staging: str, directory: str) -> None:
    """Mend a `put_in_place` that was cut short between its renames."""
    aside = staging + _ASIDE
    if not os.path.lexists(aside):
        return
    if not os.path.lexists(directory):
        os.rename(aside, directory)
    elif not os.path.lexists(staging):
        os.rename(aside, staging)


def discard(staging: str) -> None:
    """Remove a build that never got its name: only shmload has written there."""
    assert os.path.basename(staging).startswith(_STAGING)
    shutil.rmtree(staging, ignore_errors=True)


def take_down(staging: str, directory: str) -> str:
    """Remove a view directory that has lost its name; keep what others have put there.

    Args:
        staging: where it is now.
        directory: where the rest goes: to the same places in it, or to a directory beside it.

    Returns:
        Where the rest is; empty if there was none, or all of it has found its place.
    """
    here = read_marker(staging)
    if here:
        _remove_own(staging, here)
    _remove_empty(staging)
    if not os.path.isdir(staging):
        return ""
    if not os.path.lexists(directory):
        os.rename(staging, directory)
        return directory
    _carry(staging, directory)
    _remove_empty(staging)
    if not os.path.isdir(staging):
        return ""
    kept = f"{directory}.kept-{secrets.token_hex(4)}"
    os.rename(staging, kept)
    return kept


def _remove_own(folder: str, record: ViewRecord) -> None:
    """Remove the links and copies of a record; a link that leads elsewhere now is not ours."""
    root = Path(os.path.realpath(folder))
    for path, target in record.links.items():
        with contextlib.suppress(OSError):
            if _leads_inside(root, path) and os.readlink(root / path) == target:
                (root / path).unlink()
    for path in record.copies:
        with contextlib.suppress(OSError):
            if _leads_inside(root, path):
                (root / path).unlink()
    (root / MARKER).unlink(missing_ok=True)


def _leads_inside(root: Path, path: str) -> bool:
    """Tell whether the folders of a path are in a directory, and no links out of it."""
    return Path(os.path.realpath((root / path).parent)).is_relative_to(root)


def _remove_empty(folder: str) -> None:
    """Remove a directory and those in it, as far as they are empty."""
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _carry(staging: str, directory: str) -> None:
    """Move files to the same places in another directory, where nothing is in their way."""
    for path in list(Path(staging).rglob("*")):
        target = Path(directory) / path.relative_to(staging)
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it survives a loss of power with its name."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _unwritable(exc: OSError, directory: str) -> ViewUnwritable:
    path = exc.filename if isinstance(exc.filename, str) else directory
    return ViewUnwritable(path, exc.strerror or str(exc), "choose another place")
