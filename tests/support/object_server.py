"""A server on the loopback that has objects: as a web server, and as a bucket of S3.

It can stall, cut its answers, answer with errors, and have objects replaced. `asked` counts what
was requested.
"""

import email.utils
import hashlib
import threading
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Self
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKET = "models"


class ObjectServer:
    """Serves `objects`, contents by name, until it is closed; a context."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.trouble: Callable[[str, int], str] = lambda name, count: ""
        """Given an object's name and how often its bytes were asked for: what goes wrong now, one
        of `stall`, `cut`, `503`, `429`, `403`, `whole`, or nothing."""
        self.released = threading.Event()
        """Ends stalls."""
        self.told: list[str] = []
        """The headers of all requests."""
        handler = type("Handler", (_Handler,), {"of": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """The objects' URL on a web server."""
        return f"http://127.0.0.1:{self._server.server_port}/{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which obstore takes this server for S3."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a key",
            "AWS_SECRET_ACCESS_KEY": "not to be seen",
            "AWS_REGION": "us-east-1",
        }

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Have all files below a folder as objects."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.objects[f"{prefix}/{path.relative_to(folder)}"] = path.read_bytes()


def tag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    of: ObjectServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(parts.query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
        else:
            self._answer(with_body=True)

    def _list(self, prefix: str) -> None:
        self.of.asked["list"] += 1
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size>"
            f"<LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>{escape(tag_of(content))}</ETag></Contents>"
            for name, content in sorted(self.of.objects.items())
            if name.startswith(prefix)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        self._send(200, body.encode(), {"Content-Type": "application/xml"})

    def _answer(self, *, with_body: bool) -> None:
        self.of.told.append(str(self.headers))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        name = path.removeprefix(f"/{BUCKET}/")
        content = self.of.objects.get(name)
        if content is None:
            self._send(404, b"", {})
            return
        headers = {
            "ETag": tag_of(content),
            "Last-Modified": email.utils.formatdate(1_767_000_000, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if not with_body:
            self._send(200, b"", headers | {"Content-Length": str(len(content))})
            return
        self.of.asked[name] += 1
        trouble = self.of.trouble(name, self.of.asked[name])
        if trouble.isdecimal():
            self._send(int(trouble), b"no: key=secret", {})
            return
        status, wanted = 200, content
        given = self.headers.get("Range")
        if given and trouble != "whole":
            first, _, last = given.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1, len(content))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            status, wanted = 206, content[int(first) : end]
        if trouble == "stall":
            self.of.released.wait(30)
            self.close_connection = True
            return
        if trouble == "cut":
            headers["Content-Length"] = str(len(wanted))
            wanted = wanted[: len(wanted) // 2]
            self.close_connection = True
        self._send(status, wanted, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.close_connection = True  # a client that kept it would leave a descriptor behind
        headers["Connection"] = "close"
        headers.setdefault("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
