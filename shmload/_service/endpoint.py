"""Where the service listens: a socket in a directory that only this user can enter.

    no service --lock--> locked --bind--> listening --process ends--> stale socket, lock free
                            ^                                               |
                            +------------- the next start takes over -------+

Guarantee: at most one service per directory, by a lock that the kernel releases when its process
ends; and no connection to or from another user, whatever is at the path.
"""

import contextlib
import os
import socket
import stat
import struct
import time
from pathlib import Path

from shmload._host.linux import inode_of, try_lock
from shmload._host.procfs import lock_holders
from shmload._service.folder import default_path, make_private_folder, why_closed, why_unusable
from shmload._settings import settings
from shmload.errors import PeerRefused, ServiceRunning, ServiceUnavailable, SocketUnusable
from shmload.errors.service import OWN_DIRECTORY

_LOCK_NAME = "service.lock"
# sd_listen_fds(3): the first descriptor that systemd passes.
_FIRST_LISTEN_FD = 3
# struct ucred in socket(7): pid, uid, gid.
_UCRED = struct.Struct("3i")
# sun_path in unix(7) has 108 bytes; the last must be zero.
_MAX_PATH_NBYTES = 107
_BACKLOG = socket.SOMAXCONN
_RETRY_S = 0.02


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
        self._lock_fd = -1
        if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
            raise SocketUnusable(path, f"the path is longer than {_MAX_PATH_NBYTES} bytes")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            make_private_folder(path)
            if path.is_dir():
                raise SocketUnusable(path, "it is a directory")
            self._lock_fd = os.open(lock_path(path), flags, 0o600)
        except OSError as exc:
            raise SocketUnusable(path, f"{exc.filename}: {exc.strerror}") from exc
        try:
            if not stat.S_ISREG(os.fstat(self._lock_fd).st_mode):
                raise SocketUnusable(path, f"{lock_path(path)} is not a regular file; remove it")
            os.fchmod(self._lock_fd, 0o600)  # whatever the umask
            if not try_lock(self._lock_fd, exclusive=True):
                pid = os.pread(self._lock_fd, 20, 0).decode("ascii", "replace")
                raise ServiceRunning(path, pid, is_there=_is_listening(path))
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)
            self._is_inherited = inherited is not None
            self.listener = inherited or _bind(path)
            self.listener.setblocking(False)  # a client may have left before accept
        except BaseException:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        """Stop listening and release the lock; a second call is fine."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            self.listener.close()
            if not self._is_inherited:
                self.path.unlink(missing_ok=True)
            os.close(fd)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the service and check that it belongs to this user.

    Raises:
        ServiceUnavailable: no process listens there, or this user may not connect.
        PeerRefused: another user's process does.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_s)
        _connect_patiently(client, path, timeout_s)
        _require_own_service(client, path)
    except BaseException as exc:
        client.close()
        if isinstance(exc, OSError) and not isinstance(exc, PeerRefused):
            is_closed = isinstance(exc, PermissionError)
            reason = why_closed(path) if is_closed else why_unusable(path)
            if reason:
                raise ServiceUnavailable(path, reason, OWN_DIRECTORY) from exc
            raise ServiceUnavailable(path, exc.strerror or str(exc)) from exc
        raise
    return client


def _connect_patiently(client: socket.socket, path: Path, timeout_s: float) -> None:
    """Connect, retrying while the queue is full: the kernel then fails at once with EAGAIN."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return client.connect(str(path))
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


def _require_own_service(connection: socket.socket, path: Path) -> None:
    pid, uid = peer_of(connection)
    if uid != os.geteuid():
        raise PeerRefused(f"the service at {path} is of process {pid}, user {uid}; {OWN_DIRECTORY}")


def require_same_user(connection: socket.socket) -> None:
    """Check that the process at the other end belongs to this user.

    Raises:
        PeerRefused: it belongs to another user.
    """
    pid, uid = peer_of(connection)
    if uid != os.geteuid():
        raise PeerRefused(f"process {pid} of user {uid} is at the other end of the socket")


def _is_listening(path: Path) -> bool:
    """Tell whether a service listens there, or is starting and has no socket yet."""
    sockets = [entry for entry in path.parent.iterdir() if entry.is_socket()]
    return path in sockets or not sockets


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise SocketUnusable(path, "what lies there is not a socket")
        path.unlink(missing_ok=True)  # left by a dead service: this process has the lock
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except BaseException as exc:
        listener.close()
        if isinstance(exc, OSError):
            raise SocketUnusable(path, exc.strerror or str(exc)) from exc
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
