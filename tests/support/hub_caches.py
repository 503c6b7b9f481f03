"""Hub caches that a test fills by itself, for loads without a network."""

import hashlib
import os
from pathlib import Path


class HubCache:
    """A hub cache as huggingface_hub lays it out, in which nothing was downloaded."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, repo_id: str, source: Path, revision: str = "a" * 40) -> Path:
        """Put a directory there as a model, and return its snapshot."""
        repo = self.root / f"models--{repo_id.replace('/', '--')}"
        snapshot = repo / "snapshots" / revision
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
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
