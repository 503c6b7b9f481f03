"""The errors of the service, and of templates."""

from os import PathLike

from shmload.errors.base import ShmloadError

_Path = str | PathLike[str]

OWN_DIRECTORY = "choose a directory of your own with SHMLOAD_SOCKET"
"""The remedy for a socket that this user may not use."""


class ServiceError(ShmloadError):
    """The service cannot be used."""


class ServiceUnavailable(ServiceError, ConnectionError):
    """No service listens, or it ended."""

    def __init__(
        self, path: _Path, reason: str, remedy: str = "start one with `shmload serve`"
    ) -> None:
        self.path = path
        super().__init__(f"no service answers at {path}: {reason}; {remedy}")


class ServiceSilent(ServiceUnavailable):
    """A service accepted the connection and then did not answer.

    Attributes:
        pid: process id of the service; None if this process cannot see it.
    """

    def __init__(self, path: _Path, timeout_s: float, pid: int | None) -> None:
        self.path = path
        self.pid = pid
        ShmloadError.__init__(
            self,
            f"the service at {path}, process {pid or 'unknown'}, does not answer in {timeout_s:g} "
            f"s; {f'`kill -9 {pid}`' if pid else 'end it'}, then `shmload serve`",
        )


class ServiceRunning(ServiceError):
    """A service of this user is already running.

    Args:
        path: where the new service was to listen.
        pid: process id of the running service, as its lock file says.
        is_there: whether the running service listens at the same path.
    """

    def __init__(self, path: _Path, pid: str, is_there: bool) -> None:
        self.path = path
        by = f"(process {pid or 'unknown'})"
        super().__init__(
            f"a service is running at {path} {by}; use it, or end it with `shmload shutdown`"
            if is_there
            else f"a service is running {by} whose socket lies in the directory of {path}, under "
            "another name; choose another directory of your own with SHMLOAD_SOCKET"
        )


class SocketUnusable(ServiceError):
    """The service cannot listen at its path."""

    def __init__(self, path: _Path, reason: str) -> None:
        self.path = path
        super().__init__(f"cannot listen at {path}: {reason}; {OWN_DIRECTORY}")


class PeerRefused(ServiceError, PermissionError):
    """Another user is at the other end of the service's socket."""


class TemplateUnavailable(ShmloadError):
    """No template could be started.

    Args:
        name: of the template.
        reason: what went wrong.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(
            f"the template {name} cannot be started: {reason}; programs under `shmload run` start "
            "in the ordinary way"
        )
