"""A web server on the loopback that leaves no connection behind in either of its ends."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CLIENT_ENDS_S = 2.0


class LoopbackServer(ThreadingHTTPServer):
    """Answers requests in threads, until `end`.

    Each connection has one request: a client that kept one would leave a descriptor behind.

    Args:
        handler: answers a request, and then has the connection closed.
        port: to listen at; 0 for any.
    """

    daemon_threads = False  # so that `end` waits for them

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self._accepting = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._accepting.start()

    def shutdown_request(self, request: Any) -> None:
        """Say that the answer has ended, and close the connection after the client has."""
        with contextlib.suppress(OSError):  # the client may be gone
            request.shutdown(socket.SHUT_WR)
            request.settimeout(_CLIENT_ENDS_S)
            while request.recv(1 << 16):
                pass
        self.close_request(request)

    def end(self) -> None:
        """Take no more requests, and wait until those under way are answered."""
        self.shutdown()
        self.server_close()
        self._accepting.join()
