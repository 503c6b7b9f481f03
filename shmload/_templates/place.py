"""Where templates are met: a directory of this user, with a socket for each template.

Guarantee: the directory belongs to this user and is closed to others, or nothing in it is used.
"""

import contextlib
import os
import stat
import time

_MAX_SOCKET_PATH = 107  # sun_path, see unix(7)
_FAILURE_S = 600.0


class PlaceUnsafe(Exception):
    """The directory is not, or cannot be made, this user's alone."""


def folder() -> str:
    """Return the directory of this user's templates; make it if it does not exist.

    Raises:
        PlaceUnsafe: another user could write there, or it cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or ""
    if base.startswith("/") and os.path.isdir(base):
        parts = [f"{base}/shmload", f"{base}/shmload/templates"]
    else:
        base = f"/tmp/shmload-{os.geteuid()}"
        parts = [base, f"{base}/templates"]
    try:
        for part in parts:
            _make_private(part)
    except OSError as exc:
        raise PlaceUnsafe(f"{parts[-1]} cannot be used: {exc}") from exc
    return parts[-1]


def socket_of(key: str) -> str:
    """Return the path of a template's socket.

    Raises:
        PlaceUnsafe: see `folder`; or the path is too long for a socket.
    """
    path = f"{folder()}/{key}"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise PlaceUnsafe(f"{path} is too long for a socket")
    return path


def write_failure(key: str, reason: str) -> None:
    """Note why there can be no template, for the programs that would start one."""
    with open(socket_of(key) + ".failed", "w", encoding="utf-8") as file:
        file.write(reason)


def read_failure(key: str) -> str | None:
    """Return why there can be no template; None if that is not known, or a while ago."""
    try:
        path = socket_of(key) + ".failed"
        if time.time() - os.stat(path).st_mtime > _FAILURE_S:
            return None
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, PlaceUnsafe):
        return None


def forget_failure(key: str) -> None:
    """Forget why there could be no template: one is started now."""
    with contextlib.suppress(OSError, PlaceUnsafe):
        os.unlink(socket_of(key) + ".failed")


def remember(modules: list[str]) -> None:
    """Note modules that programs import, for the templates that start later."""
    new = set(modules) - set(remembered())
    if new:
        with (
            contextlib.suppress(OSError, PlaceUnsafe),
            open(f"{folder()}/modules", "a", encoding="utf-8") as file,
        ):
            file.write("".join(f"{name}\n" for name in modules if name in new))


def remembered() -> list[str]:
    """Return the modules that programs have imported, in the order of their first import."""
    try:
        with open(f"{folder()}/modules", encoding="utf-8") as file:
            return file.read().split()
    except (OSError, PlaceUnsafe):
        return []


def forget_modules() -> None:
    """Forget the modules that programs have imported: a template with them was not fit."""
    with contextlib.suppress(OSError, PlaceUnsafe):
        os.unlink(f"{folder()}/modules")


def sockets() -> list[str]:
    """Return the paths of the sockets of all templates."""
    return sorted(
        entry.path for entry in os.scandir(folder()) if stat.S_ISSOCK(entry.stat().st_mode)
    )


def _make_private(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a directory of this user alone")
