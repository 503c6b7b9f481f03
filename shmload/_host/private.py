"""Files and directories that no other user can have written, nor put in another's place.

The directories of sockets decide who is talked to and whose code runs. `shmload run` imports this
before each program, so it imports next to nothing.
"""

import os
from stat import S_ISDIR, S_ISVTX

_ELSE = "/tmp"
_OTHERS_MAY_WRITE = 0o022


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
    """Return the path of a private directory; make it if it is missing.

    The path has no links, and no other user may write to a directory above: it is as good as a
    descriptor.

    Raises:
        PermissionError: other users may write there, or exchange it.
        OSError: it cannot be made, or is no directory.
    """
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    # Only now: another user could have put a link where none was.
    if why := _why_exchangeable(path):
        raise PermissionError(why)
    os.close(open_private(path, make=True))
    return path


def open_private(path: str | os.PathLike[str], *, make: bool = False) -> int:
    """Open a directory to which no other user can write; the descriptor is the caller's.

    What is reached through it, with `dir_fd`, lies in this directory, also if
    another user exchanges one above.

    Args:
        path: of the directory, which may be no link.
        make: it and the missing ones above it, for this user alone.

    Raises:
        PermissionError: it is another user's, or others may write to it.
        OSError: it is missing, is no directory, or cannot be made or opened.
    """
    if make:
        for each in (os.path.dirname(path), path):
            os.makedirs(each, 0o700, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        require_own(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def belongs_here(found: os.stat_result) -> bool:
    """Tell whether a file or directory is this user's or root's; others may still write to it."""
    return found.st_uid in (os.geteuid(), 0)


def require_own(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Refuse a file or directory that another user can have written.

    Args:
        found: what stat says of it.
        path: for the error.

    Raises:
        PermissionError: it is another user's, or others may write to it.
    """
    if not belongs_here(found):
        raise PermissionError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise PermissionError(f"other users may write to {path} (`chmod go-w {path}` ends that)")


def is_own(path: str | os.PathLike[str], nbytes: int) -> bool:
    """Tell whether a file is there, of this user or of root, and has at least some size."""
    try:
        found = os.lstat(path)
        require_own(found, path)
    except OSError:
        return False
    return found.st_size >= nbytes


def _why_exchangeable(path: str) -> str:
    """Say why another user could put something else at a path; empty if none can.

    In a user namespace root may have another number: that of the owner of `/`.
    """
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    while path != "/":
        path = os.path.dirname(path)
        found = os.lstat(path)
        if not S_ISDIR(found.st_mode):
            return f"{path} is not a directory"
        if found.st_uid not in trusted:
            return f"{path} belongs to user {found.st_uid}"
        if found.st_mode & _OTHERS_MAY_WRITE and not found.st_mode & S_ISVTX:
            return f"{path} lets other users rename what lies there (`chmod +t {path}` ends that)"
    return ""
