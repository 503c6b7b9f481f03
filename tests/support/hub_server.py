"""A stand-in for the hub on the loopback: what huggingface_hub asks of it to download models.

It has one repository, perhaps private. It can hold answers back, refuse files and cut them short,
and it knows what was asked. Nothing else on the network is asked for anything.
"""

import hashlib
import json
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import huggingface_hub
import pytest
from loopback import LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Callable

# Files with these are stored apart on the hub, and known by their sha256.
_LARGE = (".safetensors", ".bin")
_BLOCK_NBYTES = 1 << 20


class Stored:
    """One file of a repository."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = path.stat().st_size
        self.is_large = path.name.endswith(_LARGE)
        content = hashlib.sha256() if self.is_large else hashlib.sha1(b"blob %d\0" % self.nbytes)
        with path.open("rb") as file:
            while block := file.read(_BLOCK_NBYTES):
                content.update(block)
        self.etag = content.hexdigest()

    def entry(self, name: str) -> dict[str, Any]:
        """Return it as the list of a repository's tree has it."""
        found: dict[str, Any] = {"type": "file", "path": name, "size": self.nbytes}
        found["oid"] = self.etag[:40]
        if self.is_large:
            found["lfs"] = {"oid": self.etag, "size": self.nbytes, "pointerSize": 134}
        return found


class HubServer:
    """Serves one repository, `org/name`, until it is closed; a context.

    Args:
        port: to listen at; 0 for any.
    """

    repo_id = "org/name"

    def __init__(self, port: int = 0) -> None:
        self.commits: dict[str, dict[str, Stored]] = {}
        """The files of each commit by their names."""
        self.branches: dict[str, str] = {}
        """The commit of each branch."""
        self.token = ""
        """What a request must bring; empty if the repository is public."""
        self.trouble: Callable[[str], str] = lambda name: ""
        """Called before the bytes of a file are sent; it may block. Returns what goes wrong: `403`,
        `cut`, or nothing."""
        self.rate = 0.0
        """The most that it sends in all, in bytes per second; 0 for no limit."""
        self.asked: list[str] = []
        """The files whose bytes were asked for, in this order; those of a rest have a `+`."""
        self.requests = 0
        """How many requests came, for anything."""
        self._sending = threading.Lock()
        self._free_at = 0.0
        handler = type("Handler", (_Handler,), {"of": self})
        self._server = LoopbackServer(handler, port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.end()

    @property
    def url(self) -> str:
        """What `HF_ENDPOINT` is to be."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def publish(self, folder: Path, branch: str = "main") -> str:
        """Commit all files of a folder to a branch, and return the commit."""
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): Stored(path) for path in found}
        known = "".join(f"{name} {stored.etag}\n" for name, stored in files.items())
        commit = hashlib.sha1(known.encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this process take it for the hub during a test."""
        constants = huggingface_hub.constants
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # or tiny files have one
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, huggingface_hub.file_download):  # before version 1 it has a copy
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", self.url)
        reset_sessions()

    def wait_for_turn(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent."""
        if self.rate:
            with self._sending:
                self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.rate
                until = self._free_at
            time.sleep(max(0.0, until - time.monotonic()))


def reset_sessions() -> None:
    """Drop the connections of huggingface_hub, which depend on whether it is offline."""
    utils = huggingface_hub.utils
    # Its name before version 1.
    reset = getattr(utils, "close_session", None) or getattr(utils, "reset_sessions", None)
    assert reset
    reset()


class _Handler(BaseHTTPRequestHandler):
    of: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.of.requests += 1
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        is_allowed = not self.of.token or self.headers["Authorization"] == f"Bearer {self.of.token}"
        kind, _, rest = path.partition(f"{self.of.repo_id}")
        if kind not in ("", "api/models/") or not is_allowed:
            self._refuse(401, "RepoNotFound", "Repository Not Found")
            return
        action, _, rest = rest.strip("/").partition("/")
        revision, _, name = rest.partition("/") if action else ("main", "", "")
        commit = self.of.branches.get(revision, revision)
        files = self.of.commits.get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif action == "resolve":
            self._send_file(files, commit, name)
        elif action == "tree":
            self._send_json([stored.entry(name) for name, stored in files.items()])
        else:
            siblings = [{"rfilename": name} for name in files]
            self._send_json({"id": self.of.repo_id, "sha": commit, "siblings": siblings})

    def _send_file(self, files: dict[str, Stored], commit: str, name: str) -> None:
        stored = files.get(name)
        if stored is None:
            self._refuse(404, "EntryNotFound", f"{name} does not exist", commit)
            return
        begin, status = 0, 200
        headers = {"X-Repo-Commit": commit, "ETag": f'"{stored.etag}"', "Accept-Ranges": "bytes"}
        if stored.is_large:
            headers["X-Linked-Etag"] = headers["ETag"]
            headers["X-Linked-Size"] = str(stored.nbytes)
        if given := self.headers["Range"]:
            begin, status = int(given.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {begin}-{stored.nbytes - 1}/{stored.nbytes}"
        end = stored.nbytes
        if self.command == "GET":
            self.of.asked.append(f"{name}+" if begin else name)
            trouble = self.of.trouble(name)
            if trouble == "403":
                self._refuse(403, "GatedRepo", f"Access to {name} is restricted", commit)
                return
            if trouble == "cut":
                end = begin + (end - begin) // 2
        self._begin(status, headers | {"Content-Length": str(stored.nbytes - begin)})
        if self.command == "GET":
            self._send_bytes(stored.path, begin, end)

    def _send_bytes(self, path: Path, begin: int, end: int) -> None:
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end:
                block = file.read(min(_BLOCK_NBYTES, end - begin))
                begin += len(block)
                self.of.wait_for_turn(len(block))
                try:
                    self.wfile.write(block)
                except ConnectionError:  # who asked has given up
                    return

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self._begin(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Length": "0"}
        self._begin(status, headers | ({"X-Repo-Commit": commit} if commit else {}))

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.close_connection = True
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
