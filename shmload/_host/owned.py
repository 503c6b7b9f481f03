"""Folders and files that no other user can have written.

Guarantee: what is read here was written by this user or by root, and nobody else could change it.
"""

import contextlib
import os
import re
import stat

from shmload._host.descriptors import Descriptor

KEY = re.compile(r"[0-9a-f]{32}")
"""A name under which something is remembered."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_folder(path: str | os.PathLike[str], *, make: bool = False) -> Descriptor:
    """Open a folder of this user or of root, to be closed by the caller.

    If other users can write to a folder of this user, they are kept out from now on, and the files
    in it that are named by a key are removed.

    Args:
        path: of the folder; it may not be a link.
        make: make it if it is missing, for this user alone.

    Raises:
        PermissionError: another user can write to it.
        OSError: it is missing, or cannot be made or opened.
    """
    if make:
        for each in (os.path.dirname(path), path):
            os.makedirs(each, stat.S_IRWXU, exist_ok=True)
    folder = Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    try:
        found = os.fstat(folder.fd)
        if found.st_uid == os.geteuid() and found.st_mode & _OTHERS_WRITE:
            os.fchmod(folder.fd, stat.S_IRWXU)
            found = os.fstat(folder.fd)
            for name in filter(KEY.fullmatch, os.listdir(folder.fd)):
                with contextlib.suppress(OSError):  # a directory, or another process does the same
                    os.unlink(name, dir_fd=folder.fd)
        require_own(found, path)
    except BaseException:
        folder.close()
        raise
    return folder


def read_own(name: str, folder: Descriptor) -> bytes:
    """Read a file in a folder.

    Raises:
        PermissionError: another user can have written it.
        OSError: it is missing, is a link, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder.fd), "rb") as file:
        found = os.fstat(file.fileno())
        require_own(found, name)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{name} is no file")
        return file.read()


def belongs_here(found: os.stat_result) -> bool:
    """Tell whether a file or folder is this user's or root's; others may still write to it."""
    return found.st_uid in (os.geteuid(), 0)


def require_own(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Refuse a file or folder that another user can have written.

    Args:
        found: what stat says of it.
        path: for the error.

    Raises:
        PermissionError: it is another user's, or others may write to it.
    """
    if not belongs_here(found):
        raise PermissionError(f"{path} belongs to another user")
    if found.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"other users may write to {path}")


def is_own(path: str | os.PathLike[str], nbytes: int) -> bool:
    """Tell whether a file is there, of this user or of root, and has at least some size."""
    try:
        found = os.lstat(path)
        require_own(found, path)
    except OSError:
        return False
    return found.st_size >= nbytes
