"""Hub caches that a test fills by itself, for loads without a network."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelInfo
from huggingface_hub.utils import LocalEntryNotFoundError, filter_repo_objects


class HubCache:
    """A hub cache as huggingface_hub lays it out, in which nothing was downloaded."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        repo_id: str,
        source: Path,
        revision: str = "a" * 40,
        only: Collection[str] | None = None,
    ) -> Path:
        """Put a directory there as a model, all or some of its files, and return its snapshot."""
        repo = self.root / f"models--{repo_id.replace('/', '--')}"
        snapshot = repo / "snapshots" / revision
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            if only is not None and str(path.relative_to(source)) not in only:
                continue
            content = path.read_bytes()
            # Large files are named by their sha256, the others by git's sha1.
            digest = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
            blob = repo / "blobs" / digest(content).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            if not blob.exists():
                blob.write_bytes(content)
            link = snapshot / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_symlink():
                continue
            link.symlink_to(os.path.relpath(blob, link.parent))
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(revision)
        return snapshot


class Hub:
    """A hub with one repository, in place of huggingface_hub's functions and diffusers' download.

    Attributes:
        downloads: the files that each download brought, in their order.
        asked: the arguments of each download.
    """

    def __init__(self, cache: HubCache, repo_id: str, source: Path) -> None:
        self._cache = cache
        self._repo_id = repo_id
        self._source = source
        self.downloads: list[list[str]] = []
        self.asked: list[dict[str, Any]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of the hub during a test."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.model_info", self._info)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._download)
        monkeypatch.setattr("diffusers.DiffusionPipeline.download", self._download)

    def _info(self, repo_id: str, **where: Any) -> ModelInfo:
        files = [{"rfilename": name} for name in self._list(repo_id)]
        return ModelInfo(id=repo_id, sha="a" * 40, siblings=files)

    def _list(self, repo_id: str) -> list[str]:
        assert repo_id == self._repo_id
        files = (path for path in self._source.rglob("*") if path.is_file())
        return [str(path.relative_to(self._source)) for path in files]

    def _download(self, repo_id: str, **given: Any) -> str:
        if given.get("local_files_only"):
            raise LocalEntryNotFoundError("not cached")
        allowed = given.pop("allow_patterns", ["*"])
        names = sorted(filter_repo_objects(self._list(repo_id), allow_patterns=allowed))
        self.downloads.append(names)
        self.asked.append(given)
        return str(self._cache.add(repo_id, self._source, only=names))
