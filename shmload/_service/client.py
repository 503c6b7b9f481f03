"""The connection of a load to the running service.

Guarantee: a call ends within a deadline, whatever the service does. `ServiceUnavailable` says that
the service went away; the load can go on without it.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from shmload._ipc.frames import Inbox, send
from shmload._segments.roots import Root
from shmload._service.endpoint import connect, service_pid, socket_path
from shmload._service.protocol import (
    VERSION,
    Answer,
    Attached,
    Noted,
    Refused,
    Request,
    Reserve,
    Reserved,
    Settle,
    Waiting,
    Welcome,
    decode_answer,
    revive,
)
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import ProtocolError, ServiceError, ServiceSilent, ServiceUnavailable

logger = logger_of(__name__)

_POLL_S = 0.1
_A = TypeVar("_A", bound=Answer)


class Client:
    """A connection to the service; a context that closes it. Not thread-safe.

    Raises:
        ServiceUnavailable: no service listens.
        ServiceSilent: a service listens but does not answer.
        PeerRefused: another user's process listens.
        ProtocolError: the service is of another version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._timeout_s = settings().service_timeout_s
        self._channel = connect(path, self._timeout_s)
        self._channel.settimeout(_POLL_S)
        self._inbox = Inbox(self._channel)
        try:
            welcome = self._receive(Welcome, self._timeout_s)
        except BaseException:
            self.close()
            raise
        self.pid = welcome.pid
        """Process id of the service."""
        if welcome.version != VERSION:
            self.close()
            raise ProtocolError(
                f"the service at {path} speaks version {welcome.version}, not {VERSION}; "
                "restart it with `shmload shutdown` and `shmload serve`"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a second call is fine."""
        self._inbox.close()
        self._channel.close()

    def ask(
        self,
        request: Request,
        kind: type[_A],
        *,
        on_wait: Callable[[], None] | None = None,
        is_cancelled: Callable[[], bool] = bool,
    ) -> _A:
        """Send a request and wait for its answer.

        Args:
            request: the request.
            kind: type of the answer.
            on_wait: called each time that the service says that there is no answer yet. With it the
                answer may take any time, as long as the service sends signs of life.
            is_cancelled: called several times a second; when true, the wait ends.

        Raises:
            ServiceUnavailable: the service went away or is silent, or `is_cancelled` was true.
            ProtocolError: the answer has another type.
            ShmloadError: the service refused, with its own error.
        """
        self._send(request)
        return self._receive(kind, self._timeout_s, on_wait, is_cancelled)

    def reserve(
        self,
        model: Root,
        nbytes: int,
        on_wait: Callable[[], None],
        is_cancelled: Callable[[], bool],
    ) -> tuple[str, ...]:
        """Reserve room for `nbytes` of segments; wait while loads that run may give some back.

        Args:
            model: the model that the segments are of.
            nbytes: their size, in bytes.
            on_wait: called each time that the service says that there is no room yet.
            is_cancelled: called several times a second; when true, the wait ends.

        Returns:
            The names of the segments that the service has evicted for it.

        Raises:
            CapacityError: there is none, and none will come within `wait_timeout_s`.
        """
        request = Reserve(nbytes, settings().wait_timeout_s, model)
        answer = self.ask(request, Reserved, on_wait=on_wait, is_cancelled=is_cancelled)
        return answer.evicted

    def settle(self) -> None:
        """Say that segments fill the room that was reserved."""
        self.ask(Settle(), Noted)

    def note(self, model: Root, found: Sequence[str], made: Sequence[str]) -> None:
        """Report the segments that a load of a model found and those it decoded.

        The load has all of them now, and ends soon.
        """
        self.ask(Attached(model, tuple(found), tuple(made)), Noted)

    def _send(self, request: Request) -> None:
        self._channel.settimeout(self._timeout_s)
        try:
            send(self._channel, request)
        except OSError as exc:
            raise self._lost(exc) from exc
        finally:
            self._channel.settimeout(_POLL_S)

    def _receive(
        self,
        kind: type[_A],
        timeout_s: float,
        on_wait: Callable[[], None] | None = None,
        is_cancelled: Callable[[], bool] = bool,
    ) -> _A:
        deadline = time.monotonic() + timeout_s
        while not is_cancelled():
            while (frame := self._inbox.next_frame()) is not None:
                deadline = time.monotonic() + timeout_s
                answer = decode_answer(frame)
                if isinstance(answer, kind):
                    return answer
                match answer:
                    case Waiting() if on_wait:
                        on_wait()
                    case Refused():
                        raise revive(answer)
                    case _:
                        raise ProtocolError(f"the service answered {type(answer).__name__}")
            try:
                is_there = self._inbox.receive()
            except TimeoutError:
                if time.monotonic() > deadline:
                    pid = service_pid(self._channel, self._path)
                    raise ServiceSilent(self._path, timeout_s, pid) from None
            except OSError as exc:
                raise self._lost(exc) from exc
            else:
                if not is_there:
                    raise ServiceUnavailable(self._path, "it ended the connection")
        raise ServiceUnavailable(self._path, "the load was given up")

    def _lost(self, exc: OSError) -> ServiceUnavailable:
        return ServiceUnavailable(self._path, exc.strerror or str(exc))


def find_service() -> Client | None:
    """Connect to the running service; None if there is none, or the settings forbid it.

    Raises:
        ServiceUnavailable: there is none, but the settings require one.
        PeerRefused, ProtocolError: it cannot be used, but the settings require one.
    """
    use = settings().service
    if use == "off":
        return None
    path = socket_path()
    # Path.exists raises if a directory above may not be searched.
    if use == "auto" and not os.path.exists(path):
        return None
    try:
        return Client(path)
    except (ServiceError, ProtocolError) as exc:
        if use == "require":
            raise
        _tell(exc)
        return None


_told: set[str] = set()


def _tell(exc: ServiceError | ProtocolError) -> None:
    """Log that a load does without the service; once as a warning if a person must act."""
    text = str(exc)
    is_gone = isinstance(exc, ServiceUnavailable) and not isinstance(exc, ServiceSilent)
    level = logging.INFO if is_gone or text in _told else logging.WARNING
    _told.add(text)
    logger.log(level, "%s; loading without it", text)
