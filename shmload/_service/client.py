"""The running service, as a load sees it.

Guarantee: whatever the service does, a call ends within a deadline. Where it goes away, the caller
learns so by `ServiceUnavailable` and can do without it.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from shmload._decoding.coordinator import Job, OnBytes
from shmload._ipc.frames import Inbox, send
from shmload._service.endpoint import connect, service_pid, socket_path
from shmload._service.protocol import (
    VERSION,
    Answer,
    Attached,
    BytesRead,
    Decode,
    Decoded,
    Lend,
    Noted,
    Refused,
    Request,
    Reserve,
    Reserved,
    Stat,
    Welcome,
    decode_answer,
    revive,
)
from shmload._settings import settings
from shmload._wording import printable
from shmload.errors import ProtocolError, ServiceError, ServiceSilent, ServiceUnavailable

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_DIGEST = re.compile(r"[0-9a-f]{32}")
_A = TypeVar("_A", bound=Answer)

OnProgress = Callable[[int, int], None]


class Service(Protocol):
    """What a load needs of a service: `Client` has it."""

    def reserve(self, nbytes: int) -> None:
        """Make room for so many bytes of segments, or raise `CapacityError`."""

    def decode(
        self, jobs: Sequence[Job], on_bytes: OnBytes, is_cancelled: Callable[[], bool]
    ) -> list[str]:
        """Do what `Coordinator.decode` does."""

    def note(self, found: Sequence[str], made: Sequence[str]) -> None:
        """Say which segments a load found and which it has decoded, be they resident or not."""

    def close(self) -> None:
        """Give back what this load has of it; again is fine."""


class Client:
    """A connection to the service; a context that ends it. Not for several threads at once.

    Raises:
        ServiceUnavailable: nobody is there.
        ServiceSilent: somebody is, and does not answer.
        PeerRefused: somebody else's service does.
        ProtocolError: it is of another version.
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
        """Of the service."""
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
        """End the connection; again is fine. What was lent is forgotten."""
        self._inbox.close()
        self._channel.close()

    def ask(
        self,
        request: Request,
        kind: type[_A],
        *,
        on_progress: OnProgress | None = None,
        is_cancelled: Callable[[], bool] = bool,
    ) -> _A:
        """Send a request and wait for its answer.

        Args:
            request: what is wanted.
            kind: of the answer.
            on_progress: is told of bytes read and bytes in all. With it the answer may take any
                time, as long as the service shows life.
            is_cancelled: asked several times a second; when true, the wait is given up.

        Raises:
            ServiceUnavailable: the service went away or is silent.
            ProtocolError: the answer is of another kind.
            ShmloadError: the service refused, with its own error.
        """
        self._send(request)
        timeout_s = self._timeout_s if on_progress is None else settings().stall_timeout_s
        return self._receive(kind, timeout_s, on_progress, is_cancelled)

    def reserve(self, nbytes: int) -> None:
        self.ask(Reserve(nbytes), Reserved)

    def decode(
        self, jobs: Sequence[Job], on_bytes: OnBytes, is_cancelled: Callable[[], bool]
    ) -> list[str]:
        done_before = 0

        def add(done: int, total: int) -> None:
            nonlocal done_before
            on_bytes(done - done_before)
            done_before = done

        for job in jobs:
            source = Stat(
                job.source.st_size,
                job.source.st_mtime_ns,
                job.source.st_ctime_ns,
                job.source.st_nlink,
            )
            self._send(
                Lend(printable(str(job.path)), source, job.nbytes, job.pieces),
                (job.source_fd, job.part_fd),
            )
        answer = self.ask(Decode(), Decoded, on_progress=add, is_cancelled=is_cancelled)
        # They are written into the segments' headers, in a place of just this size.
        if len(answer.digests) != len(jobs) or not all(map(_DIGEST.fullmatch, answer.digests)):
            raise ProtocolError("the service answered with digests that are not the segments'")
        return list(answer.digests)

    def note(self, found: Sequence[str], made: Sequence[str]) -> None:
        self.ask(Attached(tuple(found), tuple(made)), Noted)

    def _send(self, request: Request, fds: tuple[int, ...] = ()) -> None:
        self._channel.settimeout(self._timeout_s)
        try:
            send(self._channel, request, fds)
        except OSError as exc:
            raise self._lost(exc) from exc
        finally:
            self._channel.settimeout(_POLL_S)

    def _receive(
        self,
        kind: type[_A],
        timeout_s: float,
        on_progress: OnProgress | None = None,
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
                    case BytesRead(done, total) if on_progress:
                        on_progress(done, total)
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
    """Connect to the running service, if the settings allow for it and there is one.

    Raises:
        ServiceUnavailable: there is none, and the settings require one.
        PeerRefused, ProtocolError: there is one that cannot be used, and the settings require one.
    """
    use = settings().service
    if use == "off":
        return None
    path = socket_path()
    # Not Path.exists, which raises where a directory above may not be looked into.
    if use == "auto" and not os.path.exists(path):
        return None
    try:
        return Client(path)
    except (ServiceError, ProtocolError) as exc:
        if use == "require":
            raise
        logger.info("%s", exc)
        return None
