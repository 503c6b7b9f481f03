"""A home of the tests' own: they neither read the user's files of shmload nor leave any there.

Importing this takes the home. The libraries look for it when they are imported, so `conftest`
imports this first.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

_PLACES = {
    "HOME": "",
    "XDG_CACHE_HOME": ".cache",
    "XDG_RUNTIME_DIR": "run",
    "XDG_STATE_HOME": ".local/state",
}


def _users_folders() -> list[Path]:
    """Return where programs of the machine's user leave files of shmload."""
    home = os.path.expanduser("~")
    named = (os.environ.get(name) or f"{home}/{path}" for name, path in _PLACES.items() if path)
    return [*map(Path, named), Path("/tmp"), Path("/dev/shm")]


_FOLDERS = _users_folders()


def users_files() -> set[tuple[str, int]]:
    """Return the user's files and folders of shmload, each with the time of its last change."""
    found = set()
    for folder in _FOLDERS:
        for top in folder.glob("shmload*"):
            for path in (top, *top.rglob("*")):
                with contextlib.suppress(OSError):  # a program of the user's has removed it
                    found.add((str(path), path.lstat().st_mtime_ns))
    return found


def _take() -> Path:
    home = Path(tempfile.mkdtemp(prefix="home-", dir="/tmp"))  # short: sockets lie below it
    for name, path in _PLACES.items():
        (home / path).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[name] = str(home / path)
    return home


_HOME = _take()


def remove() -> None:
    """Remove the home, at the end of this process's tests."""
    shutil.rmtree(_HOME)
