"""Where the service listens: a socket in a directory that only this user can enter.

    no service --lock--> locked --bind--> listening --process ends--> stale socket, lock free
                            ^                                               |
                            +------------- the next start takes over -------+

Guarantee: at most one service per directory, by a lock that the kernel releases when its process
ends; and no connection to or from another user, whatever is at the path. The directory is held by a
descriptor: another user who can exchange it by its path changes nothing.
"""

import contextlib
import os
import socket
import stat
import struct
import time
from pathlib import Path

from shmload._host.descriptors import Descriptor, inode_of, try_lock
from shmload._host.own_folder import FolderUnsafe, open_private, path_in, runtime_folder
from shmload._host.procfs import lock_holders
from shmload._settings import settings
from shmload.errors import (
    PeerRefused,
    ServiceError,
    ServiceRunning,
    ServiceUnavailable,
    SocketUnusable,
)
from shmload.errors.processes import OWN_DIRECTORY

_SOCKET_NAME = "service.sock"
_LOCK_NAME = "service.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# sd_listen_fds(3): the first descriptor that systemd passes.
_FIRST_LISTEN_FD = 3
# struct ucred in socket(7): pid, uid, gid.
_UCRED = struct.Struct("3i")
# sun_path in unix(7) has 108 bytes; the last must be zero.
_MAX_PATH_NBYTES = 107
_BACKLOG = socket.SOMAXCONN
_RETRY_S = 0.02


def default_path() -> Path:
    """Return the path of this user's socket if the settings name none."""
    return Path(runtime_folder()) / _SOCKET_NAME


def socket_path() -> Path:
    """Return the path of this user's service socket."""
    chosen = settings().socket
    return default_path() if chosen is None else chosen.absolute()


def lock_path(path: Path) -> Path:
    """Return the file that the service at `path` locks; it contains the service's process id."""
    return path.with_name(_LOCK_NAME)


class Endpoint:
    """A listening socket and the lock that goes with it, from here until `close`.

    Args:
        path: where to listen, unless systemd has opened a socket for this process.

    Attributes:
        path: where it listens.

    Raises:
        ServiceRunning: another service has the lock.
        SocketUnusable: other users can enter the directory, or this one may not; or another file is
            at the path.
        PeerRefused: the descriptor that systemd passed is no listening socket.
    """

    def __init__(self, path: Path) -> None:
        inherited = _inherited_socket()
        self.path = path = _path_of(inherited, path)
        self._folder = self._lock = Descriptor(-1)
        if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
            raise SocketUnusable(path, f"the path is longer than {_MAX_PATH_NBYTES} bytes")
        try:
            self._folder = _open_folder(path)
            self._lock = Descriptor(os.open(_LOCK_NAME, _LOCK_FLAGS, 0o600, dir_fd=self._folder.fd))
            self._take_lock()
            self._is_inherited = inherited is not None
            self.listener = inherited or _bind(path, self._folder.fd)
            self.listener.setblocking(False)  # a client may have left before accept
        except BaseException as exc:
            self._lock.close()
            self._folder.close()
            if isinstance(exc, OSError) and not isinstance(exc, ServiceError):
                where = f"{exc.filename}: " if exc.filename else ""
                raise SocketUnusable(path, f"{where}{exc.strerror or exc}") from exc
            raise

    def _take_lock(self) -> None:
        fd, path = self._lock.fd, self.path
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SocketUnusable(path, f"{lock_path(path)} is not a regular file; remove it")
        os.fchmod(fd, 0o600)  # whatever the umask
        if not try_lock(fd, exclusive=True):
            pid = os.pread(fd, 20, 0).decode("ascii", "replace")
            raise ServiceRunning(path, pid, is_there=_is_listening(path.name, self._folder.fd))
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Stop listening and release the lock; a second call is fine."""
        if self._lock.fd >= 0:
            self.listener.close()
            if not self._is_inherited:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path.name, dir_fd=self._folder.fd)
        self._lock.close()
        self._folder.close()


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the service and check that it belongs to this user.

    Raises:
        ServiceUnavailable: no process listens there, or this user may not connect.
        PeerRefused: another user's process does.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_s)
        with Descriptor(open_private(str(path.parent))) as folder:
            _connect_patiently(client, path_in(folder.fd, path.name), timeout_s)
        require_same_user(client, f"the service at {path}", f"; {OWN_DIRECTORY}")
    except BaseException as exc:
        client.close()
        if isinstance(exc, OSError) and not isinstance(exc, PeerRefused):
            if reason := why_unusable(path):
                raise ServiceUnavailable(path, reason, OWN_DIRECTORY) from exc
            raise ServiceUnavailable(path, exc.strerror or str(exc)) from exc
        raise
    return client


def _connect_patiently(client: socket.socket, path: str, timeout_s: float) -> None:
    """Connect, retrying while the queue is full: the kernel then fails at once with EAGAIN."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return client.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end, as of when it connected."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(packed)
    return pid, uid


def service_pid(connection: socket.socket, path: Path) -> int | None:
    """Return the process id of the service at the other end, or None if it cannot be seen.

    A connection to a socket of systemd's may still be to systemd itself, which must not be named as
    a process to kill; only the holder of the lock is the service.
    """
    pid, _ = peer_of(connection)
    holders: set[int] = set()
    with contextlib.suppress(OSError):  # the service is ending
        holders = lock_holders().get(inode_of(lock_path(path).stat()), set())
    return pid if pid and (not holders or pid in holders) else None


def require_same_user(connection: socket.socket, what: str, remedy: str = "") -> None:
    """Check that the process at the other end belongs to this user.

    Args:
        connection: to it.
        what: names the other end in the error.
        remedy: what helps, for the error.

    Raises:
        PeerRefused: it belongs to another user.
    """
    pid, uid = peer_of(connection)
    if uid != os.geteuid():
        raise PeerRefused(f"{what} is of process {pid}, user {uid}{remedy}")


def _is_listening(name: str, folder_fd: int) -> bool:
    """Tell whether a service listens there, or is starting and has no socket yet."""
    with os.scandir(path_in(folder_fd, ".")) as entries:
        modes = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in entries}
    sockets = [each for each, mode in modes.items() if stat.S_ISSOCK(mode)]
    return name in sockets or not sockets


def _bind(path: Path, folder_fd: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    at = path_in(folder_fd, path.name)
    try:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(at).st_mode
            if stat.S_ISDIR(found):
                raise SocketUnusable(path, "it is a directory")
            if not stat.S_ISSOCK(found):
                raise SocketUnusable(path, "what lies there is not a socket")
            os.unlink(at)  # left by a dead service: this process has the lock
        listener.bind(at)
        os.chmod(at, 0o600)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _path_of(listener: socket.socket | None, path: Path) -> Path:
    """Return the path of a socket that systemd opened; `path` if it is there, or without one."""
    name = listener.getsockname() if listener else ""
    if not isinstance(name, str) or not name:  # none, or an abstract address
        return path
    with contextlib.suppress(OSError):  # no file is at the path
        if os.path.samefile(name, path):
            return path
    return Path(name)


def _open_folder(path: Path) -> Descriptor:
    """Open the directory of a socket, or make it."""
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


def _inherited_socket() -> socket.socket | None:
    """Return the socket that systemd opened for this process, or None."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    listener = socket.socket(fileno=_FIRST_LISTEN_FD)
    os.set_inheritable(_FIRST_LISTEN_FD, False)
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM or not is_listening:
        listener.detach()
        raise PeerRefused("the descriptor that LISTEN_FDS names is no listening Unix socket")
    listener.listen(_BACKLOG)  # so SO_PEERCRED names this process, not systemd
    return listener
