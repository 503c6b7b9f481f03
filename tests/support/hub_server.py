"""A stand-in for the hub on the loopback: what huggingface_hub asks of it to download models.

It has one repository, perhaps private. It can hold answers back and refuse files, and it knows what
was asked. Nothing else on the network is asked for anything.
"""

import hashlib
import json
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


class HubServer:
    """Serves one repository, `org/name`, until it is closed; a context."""

    repo_id = "org/name"

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        """The files of each commit by their names."""
        self.branches: dict[str, str] = {}
        """The commit of each branch."""
        self.token = ""
        """What a request must bring; empty if the repository is public."""
        self.trouble: Callable[[str], str] = lambda name: ""
        """Called before the bytes of a file are sent; it may block. Returns `403` to refuse it."""
        self.asked: list[str] = []
        """The files whose bytes were asked for, in this order."""
        self.requests = 0
        """How many requests came, for anything."""
        handler = type("Handler", (_Handler,), {"of": self})
        self._server = LoopbackServer(handler)

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
        files = {str(path.relative_to(folder)): path.read_bytes() for path in found}
        known = "".join(f"{name} {_digest(name, files[name])}\n" for name in files)
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


def reset_sessions() -> None:
    """Drop the connections of huggingface_hub, which depend on whether it is offline."""
    utils = huggingface_hub.utils
    # Its name before version 1.
    reset = getattr(utils, "close_session", None) or getattr(utils, "reset_sessions", None)
    assert reset
    reset()


def _digest(name: str, content: bytes) -> str:
    if name.endswith(_LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """Return a file as the list of a repository's tree has it."""
    digest = _digest(name, content)
    found = {"type": "file", "path": name, "size": len(content), "oid": digest[:40]}
    large = {"oid": digest, "size": len(content), "pointerSize": 134}
    return found | ({"lfs": large} if name.endswith(_LARGE) else {})


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
            self._send_json([_entry(*each) for each in files.items()])
        else:
            siblings = [{"rfilename": name} for name in files]
            self._send_json({"id": self.of.repo_id, "sha": commit, "siblings": siblings})

    def _send_file(self, files: dict[str, bytes], commit: str, name: str) -> None:
        if name not in files:
            self._refuse(404, "EntryNotFound", f"{name} does not exist", commit)
            return
        if self.command == "GET":
            self.of.asked.append(name)
            if self.of.trouble(name) == "403":
                self._refuse(403, "GatedRepo", f"Access to {name} is restricted", commit)
                return
        tag = f'"{_digest(name, files[name])}"'
        headers = {"X-Repo-Commit": commit, "ETag": tag}
        if name.endswith(_LARGE):
            headers |= {"X-Linked-Etag": tag, "X-Linked-Size": str(len(files[name]))}
        self._send(200, files[name], headers)

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, b"", headers | ({"X-Repo-Commit": commit} if commit else {}))

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.close_connection = True
        headers |= {"Content-Length": str(len(body)), "Connection": "close"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
