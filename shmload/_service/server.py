"""Accepts clients and serves each in a thread of its own.

Guarantee: neither a client nor a lack of threads or descriptors ends the service; a client that
cannot be served yet waits in the socket's queue.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from shmload._service.endpoint import Endpoint
from shmload._service.session import Session
from shmload._service.state import ServiceState
from shmload._wording import logger_of

logger = logger_of(__name__)

_MAX_CLIENTS = 256
_JOIN_TIMEOUT_S = 10.0
_RETRY_S = 0.1


class Sessions:
    """The threads that serve clients; a context whose end closes all connections.

    Args:
        state: shared state; the caller closes it.
        at_most: number of clients served at a time.
    """

    def __init__(self, state: ServiceState, at_most: int) -> None:
        self._state = state
        self._free = threading.BoundedSemaphore(at_most)
        self._running: dict[threading.Thread, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        running = list(self._running.items())
        for _, connection in running:
            with contextlib.suppress(OSError):  # it is ending
                connection.shutdown(socket.SHUT_RD)  # answers may still go out
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for thread, _ in running:
            thread.join(max(0, deadline - time.monotonic()))

    def accept(self, listener: socket.socket) -> None:
        """Serve the next client in a new thread; if that is not possible now, wait `_RETRY_S`."""
        if not self._free.acquire(timeout=_RETRY_S):
            return
        try:
            connection, _ = listener.accept()
        except OSError as exc:  # no descriptor is left, or the client has left
            self._put_off(exc)
            return
        thread = threading.Thread(
            target=self._run, args=(connection,), name="shmload-session", daemon=True
        )
        self._running[thread] = connection
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads can be started
            del self._running[thread]
            connection.close()
            self._put_off(exc)

    def _put_off(self, reason: Exception) -> None:
        logger.warning("a client could not be let in: %s", reason)
        self._free.release()
        time.sleep(_RETRY_S)  # the listener stays readable, so this is tried again

    def _run(self, connection: socket.socket) -> None:
        try:
            Session(connection, self._state).run()
        finally:
            del self._running[threading.current_thread()]
            self._free.release()


def serve(endpoint: Endpoint, state: ServiceState, when_ready: Callable[[], None]) -> None:
    """Serve clients until `state.stop` is called; blocks until then.

    Args:
        endpoint: where to listen; the caller closes it.
        state: shared state; the caller closes it.
        when_ready: called once, when clients can connect.
    """
    with selectors.DefaultSelector() as selector, Sessions(state, _MAX_CLIENTS) as sessions:
        selector.register(endpoint.listener, selectors.EVENT_READ)
        selector.register(state.wake_fd, selectors.EVENT_READ)
        when_ready()
        while not state.is_stopping:
            ready = {key.fileobj for key, _ in selector.select()}
            if endpoint.listener in ready:
                sessions.accept(endpoint.listener)
