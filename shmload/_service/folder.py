"""The directory of the service's socket, which only its user may enter."""

import contextlib
import os
from pathlib import Path

from shmload._host.descriptors import Descriptor
from shmload._host.own_folder import FolderUnsafe, open_private, runtime_folder
from shmload.errors import SocketUnusable

_SOCKET_NAME = "service.sock"


def default_path() -> Path:
    """Return the path of this user's socket if the settings name none."""
    return Path(runtime_folder()) / _SOCKET_NAME


def open_folder(path: Path) -> Descriptor:
    """Open the directory of a socket, or make it.

    Raises:
        SocketUnusable: it is no directory, or another user's, or open to others.
        OSError: it cannot be made.
    """
    try:
        return Descriptor(open_private(str(path.parent), makes=True))
    except FolderUnsafe as exc:
        raise SocketUnusable(path, _advise(path, exc)) from exc


def why_unusable(path: Path) -> str:
    """Say why no service of this user can listen at a path; empty if its directory may be made."""
    try:
        os.close(open_private(str(path.parent)))
    except FileNotFoundError:
        return ""
    except FolderUnsafe as exc:
        return _advise(path, exc)
    except OSError:
        return _why_closed(path)
    return ""


def _advise(path: Path, exc: FolderUnsafe) -> str:
    # Advise chmod only for the default directory, which nothing else uses.
    is_ours = path == default_path() and str(exc).endswith("lets others in")
    return f"{exc} (`chmod 700 {path.parent}` closes it)" if is_ours else str(exc)


def _why_closed(path: Path) -> str:
    """Say why this user may not connect to a socket."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):  # hidden by a directory above
            owner = each.stat().st_uid
            if owner != os.geteuid():
                return f"{each} belongs to user {owner}"
            return f"{each} is closed to its owner"
    return "Permission denied"
