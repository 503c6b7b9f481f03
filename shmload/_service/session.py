"""One client of the service: reads its requests and answers them.

Guarantee: a client that is slow, silent or gone delays no other client. If it does not read within
a deadline, its session ends.
"""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, assert_never

import msgspec

from shmload._decoding.job import DecodeCancelled
from shmload._ipc.frames import Inbox, send, to_frame
from shmload._service.budget import Claim
from shmload._service.endpoint import peer_of, require_same_user, socket_path
from shmload._service.protocol import (
    VERSION,
    Answer,
    Attached,
    GetStatus,
    Noted,
    Request,
    Reserve,
    Reserved,
    Settle,
    Shutdown,
    Stopping,
    Waiting,
    Welcome,
    decode_request,
    refuse,
)
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import (
    CapacityError,
    PeerRefused,
    ProtocolError,
    ServiceUnavailable,
    ShmloadError,
)

if TYPE_CHECKING:
    from shmload._service.state import ServiceState

logger = logger_of(__name__)

# Lets a client tell a busy service from a dead one.
_HEARTBEAT_S = 0.5


class Session:
    """Serves one connection in the thread that calls `run`; owns the socket."""

    def __init__(self, connection: socket.socket, state: "ServiceState") -> None:
        self._connection = connection
        self._state = state
        self._inbox = Inbox(connection)
        self._signs = LifeSigns(connection)
        self._claim = Claim()

    def run(self) -> None:
        """Serve until the client leaves or breaks the protocol, or the service ends."""
        with self._state.reservations.claim() as self._claim:
            try:
                require_same_user(self._connection, "the client")
                self._connection.settimeout(settings().service_timeout_s)
                send(self._connection, Welcome(VERSION, os.getpid()))
                while (request := self._next_request()) is not None:
                    self._serve(request)
            except (PeerRefused, ProtocolError) as exc:
                logger.warning("a client was put out: %s", exc)
            except OSError as exc:  # it has left, or does not read
                logger.debug("a session ended: %s", exc)
            finally:
                self.close()

    def close(self) -> None:
        """Close all that the session owns; a second call is fine."""
        self._inbox.close()
        self._connection.close()

    def _next_request(self) -> Request | None:
        """Wait for the next request: without a deadline, but a request once begun has one."""
        if self._inbox.fds:
            raise ProtocolError("descriptors came with a request that takes none")
        deadline = math.inf
        while (frame := self._inbox.next_frame()) is None:
            try:
                if not self._inbox.receive():
                    return None
            except TimeoutError:
                if not self._inbox.is_empty:
                    raise
            if self._inbox.is_empty:
                continue
            deadline = min(deadline, time.monotonic() + settings().service_timeout_s)
            if time.monotonic() > deadline:
                raise TimeoutError("a client did not finish its request")
        return decode_request(frame)

    def _serve(self, request: Request) -> None:
        try:
            answer = self._answer(request)
        except ProtocolError:
            raise  # ends the session without an answer
        except ShmloadError as exc:
            self._log_refusal(request, exc)
            answer = refuse(exc)
        except DecodeCancelled:  # the client has left, or the service ends
            self._log_refusal(request, None)
            answer = refuse(ServiceUnavailable(socket_path(), "it ends"))
        except Exception:  # the session's outermost loop: the client must be told
            logger.exception("a request failed")
            answer = refuse(ShmloadError("the service failed; its log says why; please report it"))
        self._signs.finish()
        send(self._connection, answer)

    def _log_refusal(self, request: Request, exc: ShmloadError | None) -> None:
        """Log that a request failed; without an error its client left, or the service ends."""
        pid, _ = peer_of(self._connection)
        fields: dict[str, object] = {"pid": pid}
        what = "a request"
        if isinstance(request, Reserve) and request.model:
            what = self._state.name_of(request.model)
            fields |= {"model": what, "source": request.model.path}
        if exc is None:
            why = "the service ends" if self._state.is_stopping else f"process {pid} left"
            logger.info("%s was given up: %s", what, why, extra=fields)
            return
        refused = refuse(exc)
        fields |= {"error": refused.kind, "notes": refused.notes, **_told(refused.fields)}
        if isinstance(exc, CapacityError):
            logger.warning("%s was refused: %s", what, exc, extra=fields)
        else:
            logger.error("%s failed: %s", what, " ".join((str(exc), *refused.notes)), extra=fields)

    def _answer(self, request: Request) -> Answer:
        match request:
            case Reserve():
                return self._reserve(request)
            case Settle():
                self._claim.nbytes = 0
                return Noted()
            case Attached(model, found, made):
                self._state.usage.note(model, hits=len(found), misses=len(made))
                self._claim.nbytes = 0
                self._claim.is_ending = True
                return Noted()
            case GetStatus():
                status = self._state.status()
                return msgspec.structs.replace(status, clients=status.clients - 1)  # who asks
            case Shutdown():
                self._state.stop()
                return Stopping()
            case _:
                assert_never(request)

    def _reserve(self, request: Reserve) -> Reserved:
        def wait() -> None:
            if self._is_gone():
                raise DecodeCancelled

        evicted = self._state.reserve(self._claim, request.nbytes, request.timeout_s, wait)
        return Reserved(tuple(evicted))

    def _is_gone(self) -> bool:
        """Whether the client has left or is stuck, or the service ends; sends a sign of life."""
        self._signs.beat()
        return self._signs.is_stuck or has_hung_up(self._connection) or self._state.is_stopping


class LifeSigns:
    """Says that a client waits; never blocks, and skips signs while the socket is full.

    Thread-safe.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent = b""
        self._sent_at = 0.0
        self._took_at = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether the client has read nothing for `service_timeout_s`."""
        waited_s = time.monotonic() - self._took_at
        return bool(self._unsent) and waited_s > settings().service_timeout_s

    def beat(self) -> None:
        """Say that the client waits, if that was not said for `_HEARTBEAT_S`."""
        with self._lock:
            if time.monotonic() - self._sent_at > _HEARTBEAT_S:
                self._send()

    def _send(self) -> None:
        if not self._unsent:
            self._unsent = to_frame(Waiting())
            self._took_at = time.monotonic()
        # MSG_DONTWAIT is not enough: on a socket with a timeout Python waits before it sends.
        if not _has_event(self._connection, select.POLLOUT):
            return
        # An error means that the client has left, which `has_hung_up` tells.
        with contextlib.suppress(OSError):
            sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self._unsent = self._unsent[sent:]
            self._took_at = self._sent_at = time.monotonic()

    def finish(self) -> None:
        """Send the rest of a sign that was begun, with the socket's timeout."""
        with self._lock:
            unsent, self._unsent = self._unsent, b""
            if unsent:
                self._connection.sendall(unsent)


def _told(fields: Mapping[str, object]) -> dict[str, object]:
    """Return what an error says of a file and of amounts, for the log."""
    return {
        name: fields[name] for name in ("path", "needed", "available", "limit") if name in fields
    }


def has_hung_up(connection: socket.socket) -> bool:
    """Tell whether the other end is closed; what it sent before can still be read."""
    return _has_event(connection, select.POLLRDHUP)


def _has_event(connection: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(0))
