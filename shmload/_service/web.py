"""What the service says over HTTP: metrics for Prometheus, health and readiness for supervisors.

    /metrics   numbers, in Prometheus's text format or OpenMetrics
    /healthz   200 while the service serves clients, 503 once it ends
    /readyz    200 once the preload list is done; else 503, with the reasons
    any other  404

Guarantee: a client that is slow, silent or gone delays no other one, and all clients together take
no more than `_MAX_CLIENTS` descriptors and threads from the service, each for `_TIMEOUT_S` at most.
"""

import contextlib
import io
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from shmload._service.state import ServiceState
from shmload._version import __version__
from shmload._wording import logger_of
from shmload.errors import ShmloadError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logger_of(__name__)

# How long a connection may last, from its begin to the last byte of the answer.
_TIMEOUT_S = 10.0
# Any user of the machine may connect; the service's own clients need the other descriptors.
_MAX_CLIENTS = 32
_RETRY_S = 0.1
_METHODS = ("GET", "HEAD")

# Name after `shmload_`, attribute of `Status`, help text.
_GAUGES = (
    ("resident_bytes", "resident_nbytes", "Shared memory of segments."),
    ("budget_bytes", "budget_nbytes", "What may be resident."),
    ("room_bytes", "room_nbytes", "Memory that is free for segments."),
    ("segments", "segments", "Resident segments."),
    ("pinned_segments", "pinned", "Segments that are never evicted."),
    ("waiting_for_room", "waiting_for_room", "Loads that wait for room in the budget."),
    ("reserved_bytes", "reserved_nbytes", "Room that loads have reserved for what they decode."),
    ("clients", "clients", "Connections."),
    ("uptime_seconds", "uptime_s", "Time since the service started."),
)

_Reasons = Callable[[], Sequence[str]]
"""Returns why the answer is no, each in words; nothing if it is yes. Called from any thread."""


def make_app(state: ServiceState) -> "WSGIApplication":
    """Return the application that answers the requests."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceMetrics(state))
    pages = {
        "/metrics": make_wsgi_app(registry),
        "/healthz": _page_of(state.reasons_unhealthy),
        "/readyz": _page_of(state.reasons_unready),
    }

    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            return _say(start, "404 Not Found", f"there is {', '.join(pages)}\n")
        if environ["REQUEST_METHOD"] not in _METHODS:
            allowed = ("Allow", ", ".join(_METHODS))
            return _say(start, "405 Method Not Allowed", "ask with GET\n", allowed)
        try:
            body = page({**environ, "REQUEST_METHOD": "GET"}, start)
        except Exception:  # a request's outermost function: who asks must be told
            logger.exception("a request for %s failed", environ["PATH_INFO"])
            body = _say(start, "500 Internal Server Error", "the log says why\n")
        return body if environ["REQUEST_METHOD"] == "GET" else []

    return answer


def serve_http(host: str, port: int, app: "WSGIApplication") -> int:
    """Serve an application from a new thread, until the process ends.

    Args:
        host: name or address.
        port: 0 for any free port.
        app: answers each request, in a thread of its own.

    Returns:
        The port in use.

    Raises:
        ShmloadError: the host has no such address, or the port is taken.
    """
    try:
        server = _Server(host, port)
    except OSError as exc:
        raise ShmloadError(
            f"metrics cannot be served at {host} port {port}: {exc.strerror or exc}; "
            "choose another with --metrics"
        ) from exc
    server.set_app(app)
    threading.Thread(target=server.serve_forever, name="shmload-http", daemon=True).start()
    return int(server.server_port)


class ServiceMetrics(Collector):
    """Reads the service's state at each scrape."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status = self._state.status()
        for name, attribute, text in _GAUGES:
            yield GaugeMetricFamily(f"shmload_{name}", text, getattr(status, attribute))
        yield GaugeMetricFamily("shmload_leased_segments", "Segments in use.", len(status.leases))
        failed = len(self._state.preloading.failed)
        text = "Sources that could not be preloaded."
        yield GaugeMetricFamily("shmload_failed_preloads", text, failed)
        build = GaugeMetricFamily("shmload_build", "The version, as a label.", labels=("version",))
        build.add_metric([__version__], 1)
        yield build
        yield from self._state.usage.collect()


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread of its own; one too many ends the oldest."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[socket.socket, float] = {}
        """Of the connections that are being served; infinite for one that was told to end."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def server_bind(self) -> None:
        """Bind without asking for the host's full name, which may take long without a DNS."""
        self.server_name, self.server_port = str(self.server_address[0]), 0
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; if that is not possible now, fail after `_RETRY_S`, not at once."""
        with self._changed:
            if not self._has_room():
                self._end_oldest()
                if not self._changed.wait_for(self._has_room, _RETRY_S):
                    raise BlockingIOError
            try:
                connection, address = super().get_request()
            except OSError:  # no descriptor is left, or the client has left
                self._changed.wait(_RETRY_S)
                raise
            self._deadlines[connection] = time.monotonic() + _TIMEOUT_S
        return connection, address

    def service_actions(self) -> None:
        """End the connections whose time is over; called after each, and twice a second."""
        with self._changed:
            while min(self._deadlines.values(), default=math.inf) <= time.monotonic():
                self._end_oldest()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._changed:  # so that none is ended whose number another file has by now
            del self._deadlines[request]
            super().shutdown_request(request)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._deadlines) < _MAX_CLIENTS

    def _end_oldest(self) -> None:
        """Have the thread of the oldest connection find its end; the caller has the lock."""
        connection = min(self._deadlines, key=self._deadlines.__getitem__)
        self._deadlines[connection] = math.inf
        with contextlib.suppress(OSError):  # the client has ended it
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log an error of a connection; most often the client has left."""
        logger.debug("a request over HTTP failed: %s", sys.exception())


class _Handler(WSGIRequestHandler):
    """Answers a request, and logs none."""

    def get_stderr(self) -> TextIO:
        """Drop what wsgiref says of a client that left or does not read."""
        return io.StringIO()

    def log_message(self, *args: object) -> None:
        """Log nothing: a supervisor asks every few seconds."""


def _page_of(reasons: _Reasons) -> "WSGIApplication":
    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        found = reasons()
        if found:
            return _say(start, "503 Service Unavailable", "".join(f"{each}\n" for each in found))
        return _say(start, "200 OK", "ok\n")

    return answer


def _say(
    start: "StartResponse", status: str, text: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    body = text.encode("utf-8", "backslashreplace")
    kind = ("Content-Type", "text/plain; charset=utf-8")
    start(status, [kind, ("Content-Length", str(len(body))), *headers])
    return [body]
