"""The directory of the service's socket, which only its user may enter."""

import contextlib
import os
import stat
from pathlib import Path

from shmload.errors import SocketUnusable

_SOCKET_NAME = "service.sock"


def default_path() -> Path:
    """Return the path of this user's socket if the settings name none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "shmload" if runtime else Path(f"/tmp/shmload-{os.geteuid()}")
    return folder / _SOCKET_NAME


def make_private_folder(path: Path) -> None:
    """Make the directory of a socket, or check that only this user can enter it.

    Raises:
        SocketUnusable: it is no directory, or another user's, or open to others.
        OSError: it cannot be made.
    """
    folder = path.parent
    for each in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
            each.chmod(0o700)  # whatever the umask
    reason = _why_not_private(path, os.lstat(folder))
    if reason:
        raise SocketUnusable(path, reason)


def why_unusable(path: Path) -> str:
    """Say why no service of this user can listen at a path; empty if its directory may be made."""
    try:
        return _why_not_private(path, os.lstat(path.parent))
    except FileNotFoundError:
        return ""
    except OSError:
        return why_closed(path)


def _why_not_private(path: Path, found: os.stat_result) -> str:
    folder = path.parent
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a directory"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & 0o700 != 0o700:
        return f"{folder} is closed to its owner (`chmod 700 {folder}` opens it)"
    if found.st_mode & 0o077:
        # Advise chmod only for the default directory, which nothing else uses.
        advice = f" (`chmod 700 {folder}` closes it)" if path == default_path() else ""
        return f"{folder} lets others in{advice}"
    return ""


def why_closed(path: Path) -> str:
    """Say why this user may not connect to a socket."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):  # hidden by a directory above
            owner = each.stat().st_uid
            if owner != os.geteuid():
                return f"{each} belongs to user {owner}"
            return f"{each} is closed to its owner"
    return "Permission denied"
