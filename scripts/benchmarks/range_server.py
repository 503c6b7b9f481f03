"""A web server for the benchmarks: sends ranges of files below a directory, as fast as it can.

    python range_server.py DIRECTORY      prints its port; ends with its standard input

`sendfile` moves the bytes, so a server on the same machine takes little of its processor.
"""

import email.utils
import os
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_wanted=False)

    def do_GET(self) -> None:
        self._answer(is_wanted=True)

    def _answer(self, *, is_wanted: bool) -> None:
        path = self.root / urllib.parse.unquote(self.path).lstrip("/")
        if not path.is_file():
            self._head(404, {"Content-Length": "0"})
            return
        found = path.stat()
        begin, end = 0, found.st_size
        headers = {
            "ETag": f'"{found.st_mtime_ns}-{found.st_size}"',
            "Last-Modified": email.utils.formatdate(found.st_mtime, usegmt=True),
        }
        given = self.headers.get("Range")
        if given:
            first, _, last = given.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, found.st_size)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.st_size}"
        self._head(206 if given else 200, headers | {"Content-Length": str(end - begin)})
        if not is_wanted:
            return
        with open(path, "rb") as file:
            while begin < end:
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def main() -> None:
    """Serve the directory that the command line names."""
    handler = type("Handler", (_Handler,), {"root": Path(sys.argv[1])})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
