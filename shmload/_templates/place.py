"""Where templates are met: a directory of this user, with socket, lock and notes of each template.

Guarantee: the directory belongs to this user, is closed to others, and no other user can exchange
it; or nothing in it is used.
"""

import _blake2  # without hashlib, which takes 3 ms to import
import fcntl
import os
import time

from shmload._host.private import private_path, runtime_folder

_FAILURE_S = 600.0
_MAX_TEMPLATES = 16


def folder() -> str:
    """Return the directory of this user's templates; make it if it does not exist.

    Raises:
        OSError: another user can write there or exchange it, or it cannot be made.
    """
    return private_path(f"{runtime_folder()}/templates")


def key_of(facts: str) -> str:
    """Return a short name for these facts."""
    raw = facts.encode("utf-8", "surrogateescape")
    return _blake2.blake2b(raw, digest_size=8).hexdigest()


def socket_of(key: str) -> str:
    """Return the path of a template's socket.

    Raises:
        OSError: see `folder`.
    """
    return f"{folder()}/{key}"


def take_lock(key: str) -> int | None:
    """Lock the right to be the template of this key, and write who has it; None if another has.

    Returns:
        A descriptor, which holds it until it is closed, also in copies of this process.

    Raises:
        OSError: the file cannot be made.
    """
    fd = _lock(key, fcntl.LOCK_EX)
    if fd is not None:
        os.ftruncate(fd, 0)
        remove(key)  # the socket of the last one: this one does not serve yet
        os.write(fd, b"%d" % os.getpid())
    return fd


def is_taken(key: str) -> bool:
    """Tell whether a process is the template of this key, or becomes it.

    Raises:
        OSError: the file cannot be made.
    """
    fd = _lock(key, fcntl.LOCK_SH)  # several may look at a time
    if fd is not None:
        os.close(fd)
    return fd is None


def _lock(key: str, kind: int) -> int | None:
    fd = os.open(f"{socket_of(key)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def is_full() -> bool:
    """Tell whether this user has as many templates as one may have.

    Raises:
        OSError: see `folder`.
    """
    files = [entry.name.partition(".") for entry in os.scandir(folder()) if entry.is_file()]
    return sum(is_taken(key) for key, _, kind in files if kind == "lock") >= _MAX_TEMPLATES


def read_failure(key: str) -> str:
    """Return why there can be no template; empty if that is not known, or a while ago."""
    is_known = age_s(key, "failed") < _FAILURE_S and not is_taken(key)
    return (read_note(key, "failed") or "") if is_known else ""


def age_s(key: str, name: str) -> float:
    """Return how long ago a note was written, in seconds; very long if there is none."""
    try:
        return time.time() - os.stat(f"{socket_of(key)}.{name}").st_mtime
    except OSError:
        return time.time()


def write_note(key: str, name: str, text: str) -> None:
    """Leave a note of a template, for others and for the next one.

    Raises:
        OSError: it cannot be written.
    """
    path = f"{socket_of(key)}.{name}"
    new = f"{path}.{os.getpid()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.replace(new, path)  # a reader finds it whole


def read_note(key: str, name: str) -> str | None:
    """Return a note; None if there is none."""
    try:
        with open(f"{socket_of(key)}.{name}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


def remove(key: str, end: str = "") -> None:
    """Remove the socket of a template, or its file with this end, if there is one."""
    try:
        os.unlink(f"{socket_of(key)}{end}")
    except OSError:
        return
