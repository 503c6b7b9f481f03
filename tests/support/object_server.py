"""A server on the loopback that has objects: as a web server, and as a bucket of S3, GCS, Azure.

It can stall, cut its answers, answer with errors, and have objects replaced. `asked` counts what
was requested.
"""

import base64
import email.utils
import hashlib
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self
from xml.sax.saxutils import escape

from loopback import LoopbackServer

BUCKET = "models"
_ACCOUNT = "account"
_CHANGED_S = 1_767_000_000


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
        self._server = LoopbackServer(handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.released.set()
        self._server.end()

    @property
    def url(self) -> str:
        """The objects' URL on a web server."""
        return f"http://127.0.0.1:{self._server.server_port}/{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which obstore takes this server for S3, for GCS and for Azure."""
        root = f"http://127.0.0.1:{self._server.server_port}"
        service_account = {
            "gcs_base_url": root,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {
            "AWS_ENDPOINT": root,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a key",
            "AWS_SECRET_ACCESS_KEY": "not to be seen",
            "AWS_REGION": "us-east-1",
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(service_account),
            "AZURE_STORAGE_ENDPOINT": root,
            "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"not to be seen").decode(),
        }

    def url_in(self, kind: str) -> str:
        """Return the objects' URL in a kind of bucket, `s3`, `gs` or `az`, or on a web `server`."""
        return self.url if kind == "server" else f"{kind}://{BUCKET}"

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Have all files below a folder as objects."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.objects[f"{prefix}/{path.relative_to(folder)}"] = path.read_bytes()


def tag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _list_of_s3(objects: dict[str, bytes]) -> str:
    rows = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size>"
        f"<LastModified>2026-01-02T03:04:05.000Z</LastModified>"
        f"<ETag>{escape(tag_of(content))}</ETag></Contents>"
        for name, content in sorted(objects.items())
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"


def _list_of_azure(objects: dict[str, bytes]) -> str:
    changed = email.utils.formatdate(_CHANGED_S, usegmt=True)
    rows = "".join(
        f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{changed}</Last-Modified>"
        f"<Content-Length>{len(content)}</Content-Length><Content-Type/>"
        f"<Etag>{escape(tag_of(content)[1:-1])}</Etag></Properties></Blob>"
        for name, content in sorted(objects.items())
    )
    return f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"


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
        if "list-type" in query:  # of S3 and GCS
            self._list(query.get("prefix", [""])[0], _list_of_s3)
        elif query.get("comp") == ["list"]:
            self._list(query.get("prefix", [""])[0], _list_of_azure)
        else:
            self._answer(with_body=True)

    def _list(self, prefix: str, write: Callable[[dict[str, bytes]], str]) -> None:
        self.of.asked["list"] += 1
        self.of.told.append(str(self.headers))
        found = {name: each for name, each in self.of.objects.items() if name.startswith(prefix)}
        self._send(200, write(found).encode(), {"Content-Type": "application/xml"})

    def _answer(self, *, with_body: bool) -> None:
        self.of.told.append(str(self.headers))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        name = path.removeprefix(f"/{_ACCOUNT}").removeprefix(f"/{BUCKET}/")
        content = self.of.objects.get(name)
        if content is None:
            self._send(404, b"", {})
            return
        headers = {
            "ETag": tag_of(content),
            "Last-Modified": email.utils.formatdate(_CHANGED_S, usegmt=True),
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
        self.close_connection = True
        headers["Connection"] = "close"
        headers.setdefault("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
