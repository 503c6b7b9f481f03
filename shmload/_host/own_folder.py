"""The directories that decide who is talked to and whose code runs: those of sockets.

Guarantee: such a directory is this user's alone, and no other user can put another in its place.
`shmload run` imports this before each program, so it imports next to nothing.
"""

import os
from stat import S_ISDIR, S_ISVTX

_ELSE = "/tmp"
_OTHERS_MAY_WRITE = 0o022


class FolderUnsafe(PermissionError):
    """A directory is not this user's alone; str says why."""


def runtime_folder() -> str:
    """Return the path of this user's directory for sockets, which may not exist yet.

    It lies in `$XDG_RUNTIME_DIR`, if that belongs to this user and no other can write there or
    exchange it; under `su` and `sudo -E` it may be of another user. Else it lies in /tmp.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or ""
    if base.startswith("/"):
        base = os.path.realpath(base)
        try:
            found = os.stat(base)
        except OSError:  # it does not exist, or is closed to this user
            found = None
        is_own = found and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_MAY_WRITE
        if is_own and not _why_exchangeable(path := f"{base}/shmload"):
            return path
    return f"{os.path.realpath(_ELSE)}/shmload-{os.geteuid()}"


def private_path(path: str) -> str:
    """Return the path of a directory that is this user's alone; make it if it is missing.

    The path has no links, and no other user may write to a directory above: it is as good as a
    descriptor.

    Raises:
        FolderUnsafe: it is not private, or another user can exchange it.
        OSError: it cannot be made.
    """
    if why := _why_exchangeable(path):
        raise FolderUnsafe(why)
    try:
        _require_private(path, os.lstat(path))
    except FileNotFoundError:
        os.close(open_private(path, makes=True))
        return private_path(path)
    return path


def open_private(path: str, *, makes: bool = False) -> int:
    """Open a directory that is this user's alone; the descriptor (O_PATH) is the caller's.

    What is reached through it, by `path_in` or with `dir_fd`, lies in this directory, also if
    another user exchanges one above.

    Args:
        path: of the directory, absolute.
        makes: it and the missing ones above it, with mode 0700 whatever the umask.

    Raises:
        FolderUnsafe: it is no directory, another user's, closed to this one, or open to others.
        OSError: it does not exist, or cannot be made or reached.
    """
    fd = _open(os.path.abspath(path), os.O_NOFOLLOW, makes=makes)
    try:
        _require_private(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def path_in(folder_fd: int, name: str) -> str:
    """Return a path of a name in an open directory, for calls that take no descriptor."""
    return f"/proc/self/fd/{folder_fd}/{name}"


def _open(path: str, flags: int, *, makes: bool) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    except FileNotFoundError:
        if not makes:
            raise
    above, name = os.path.split(path)
    parent = _open(above, os.O_DIRECTORY, makes=True)
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
        fd = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
        os.chmod(f"/proc/self/fd/{fd}", 0o700)  # whatever the umask
    except FileExistsError:  # another process was quicker, or it is a link to nothing
        return _open(path, flags, makes=False)
    except OSError as exc:
        exc.filename = path
        raise
    finally:
        os.close(parent)
    return fd


def _require_private(path: str, found: os.stat_result) -> None:
    if not S_ISDIR(found.st_mode):
        raise FolderUnsafe(f"{path} is not a directory")
    if found.st_uid != os.geteuid():
        raise FolderUnsafe(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & 0o700 != 0o700:
        raise FolderUnsafe(f"{path} is closed to its owner (`chmod 700 {path}` opens it)")
    if found.st_mode & 0o077:
        raise FolderUnsafe(f"{path} lets others in")


def _why_exchangeable(path: str) -> str:
    """Say why another user could put something else at a path; empty if none can.

    In a user namespace root may have another number: that of the owner of `/`.
    """
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    while path != "/":
        path = os.path.dirname(path)
        try:
            found = os.lstat(path)
        except FileNotFoundError:  # it is to be made
            continue
        if not S_ISDIR(found.st_mode):
            return f"{path} is not a directory"
        if found.st_uid not in trusted:
            return f"{path} belongs to user {found.st_uid}"
        if found.st_mode & _OTHERS_MAY_WRITE and not found.st_mode & S_ISVTX:
            return f"{path} lets other users rename what lies there (`chmod +t {path}` ends that)"
    return ""
