"""Where the service listens, and who may: a socket in a directory of this user's alone.

    no service --lock--> locked --bind--> listening --process ends--> stale socket, lock free
                            ^                                               |
                            +------------- the next start takes over -------+

Guarantee: at most one service per directory, held by a lock that the kernel drops with its process;
and no connection to or from another user, whatever lies at the path.
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
from shmload._settings import settings
from shmload.errors import PeerRefused, ServiceRunning, ServiceUnavailable, SocketUnusable

_SOCKET_NAME = "service.sock"
_LOCK_NAME = "service.lock"
# sd_listen_fds(3): the first descriptor that systemd passes.
_FIRST_LISTEN_FD = 3
# struct ucred in socket(7): pid, uid, gid.
_UCRED = struct.Struct("3i")
# struct sockaddr_un in unix(7) holds 108, the last of them zero.
_MAX_PATH_NBYTES = 107
_BACKLOG = socket.SOMAXCONN
_RETRY_S = 0.02


def socket_path() -> Path:
    """Return where the service of this user listens."""
    chosen = settings().socket
    return _default_path() if chosen is None else chosen.absolute()


def _default_path() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "shmload" if runtime else Path(f"/tmp/shmload-{os.geteuid()}")
    return folder / _SOCKET_NAME


def lock_path(path: Path) -> Path:
    """Return the file that the service at `path` holds locked; its process id is in it."""
    return path.with_name(_LOCK_NAME)


class Endpoint:
    """A listening socket and the lock that goes with it; a context that gives both up.

    Raises:
        ServiceRunning: another service has the lock.
        SocketUnusable: the directory is not this user's alone, or what lies there is in the way.
        PeerRefused: the socket that systemd has passed is none to listen at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1
        if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
            raise SocketUnusable(path, f"the path is longer than {_MAX_PATH_NBYTES} bytes")
        if path.is_dir():
            raise SocketUnusable(path, "it is a directory")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            _make_private_folder(path)
            self._lock_fd = os.open(lock_path(path), flags, 0o600)
        except OSError as exc:
            raise SocketUnusable(path, f"{exc.filename}: {exc.strerror}") from exc
        try:
            if not try_lock(self._lock_fd, exclusive=True):
                pid = os.pread(self._lock_fd, 20, 0).decode("ascii", "replace")
                raise ServiceRunning(path, pid, is_there=_is_listening(path))
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)
            inherited = _inherited_socket()
            self._is_inherited = inherited is not None
            self.listener = inherited or _bind(path)
            self.listener.setblocking(False)  # who knocked may have left before it is let in
        except BaseException:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        """Stop listening and let the next service start; again is fine."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            self.listener.close()
            if not self._is_inherited:
                self.path.unlink(missing_ok=True)
            os.close(fd)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the service, and make sure that it is this user's.

    Raises:
        ServiceUnavailable: nobody listens there.
        PeerRefused: somebody else does.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_s)
        _connect_patiently(client, path, timeout_s)
        require_same_user(client)
    except BaseException as exc:
        client.close()
        if isinstance(exc, OSError) and not isinstance(exc, PeerRefused):
            raise ServiceUnavailable(path, exc.strerror or str(exc)) from exc
        raise
    return client


def _connect_patiently(client: socket.socket, path: Path, timeout_s: float) -> None:
    """Connect, waiting for a place in the queue: the kernel says at once that there is none."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return client.connect(str(path))
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end, as the kernel noted them when it connected."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(packed)
    return pid, uid


def service_pid(connection: socket.socket, path: Path) -> int | None:
    """Return the service at the other end, or None if this process cannot see it.

    Who waits at a socket of systemd's may be connected to systemd, which is nobody to be killed;
    the service is who holds the lock.
    """
    pid, _ = peer_of(connection)
    holders: set[int] = set()
    with contextlib.suppress(OSError):  # it ends just now
        holders = lock_holders().get(inode_of(lock_path(path).stat()), set())
    return pid if pid and (not holders or pid in holders) else None


def require_same_user(connection: socket.socket) -> None:
    """Make sure that this user's process is at the other end.

    Raises:
        PeerRefused: it is another user's.
    """
    pid, uid = peer_of(connection)
    if uid != os.geteuid():
        raise PeerRefused(f"process {pid} of user {uid} is at the other end of the socket")


def _make_private_folder(path: Path) -> None:
    """Make the directory of a socket, or make sure that it is this user's alone."""
    folder = path.parent
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise SocketUnusable(path, f"{folder} is not a directory")
    if found.st_uid != os.geteuid():
        raise SocketUnusable(path, f"{folder} belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        # Only of the directory that nothing else uses is it known that it may be closed.
        advice = f" (`chmod 700 {folder}` closes it)" if path == _default_path() else ""
        raise SocketUnusable(path, f"{folder} lets others in{advice}")


def _is_listening(path: Path) -> bool:
    """Tell whether a service listens there; one that starts just now has perhaps no socket yet."""
    sockets = [entry for entry in path.parent.iterdir() if entry.is_socket()]
    return path in sockets or not sockets


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise SocketUnusable(path, "what lies there is not a socket")
        path.unlink(missing_ok=True)  # of a service that is dead: the lock is ours
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except BaseException as exc:
        listener.close()
        if isinstance(exc, OSError):
            raise SocketUnusable(path, exc.strerror or str(exc)) from exc
        raise
    return listener


def _inherited_socket() -> socket.socket | None:
    """Return the socket that systemd has opened for this very process, if it has."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    listener = socket.socket(fileno=_FIRST_LISTEN_FD)
    os.set_inheritable(_FIRST_LISTEN_FD, False)
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM or not is_listening:
        listener.detach()
        raise PeerRefused("the descriptor that LISTEN_FDS names is no listening Unix socket")
    listener.listen(_BACKLOG)  # that the kernel tells clients of this process, and not of systemd
    return listener
