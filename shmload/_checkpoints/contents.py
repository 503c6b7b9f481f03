"""The identity that all copies of a file have: the sha256 of its bytes, remembered by inode.

Guarantee: a digest is used only for a file that has not changed since it was read. It is the name
of the file's blob in a hub cache, so a copy also shares what was decoded from there.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path

import msgspec

from shmload._checkpoints.identity import Identity, identify
from shmload._host.files import replacing
from shmload._settings import settings

_BLOCK_NBYTES = 1 << 20
_SHA256 = re.compile(rb"[0-9a-f]{64}")
_STAMP = "sha256="


def content_identity(identity: Identity, fd: int, *, may_read: bool) -> Identity:
    """Return the identity that a file shares with its copies.

    Args:
        identity: of the file, from `identify`.
        fd: the open file; its position is not moved.
        may_read: read the whole file if its digest is not remembered.

    Returns:
        The given identity if the digest is not known, or if the file changed while it was read.

    Raises:
        OSError: the file cannot be read.
    """
    if identity.stamp.startswith(_STAMP):
        return identity
    memory = _memory_path(identity)
    digest = _remembered(memory)
    if digest is None and may_read:
        digest = _digest(fd)
        if identify(identity.path, os.fstat(fd)).key != identity.key:
            return identity
        _remember(memory, digest)
    return identity if digest is None else _with_digest(identity, digest)


def known_content(identity: Identity) -> Identity:
    """Return the identity that a file shares with its copies, if its digest is remembered.

    Args:
        identity: of the file, from `identify`; returned if the digest is not known.
    """
    if identity.stamp.startswith(_STAMP):
        return identity
    digest = _remembered(_memory_path(identity))
    return identity if digest is None else _with_digest(identity, digest)


def _with_digest(identity: Identity, digest: str) -> Identity:
    return msgspec.structs.replace(identity, stamp=f"{_STAMP}{digest}")


def _digest(fd: int) -> str:
    found = hashlib.sha256()
    offset = 0
    while block := os.pread(fd, _BLOCK_NBYTES, offset):
        found.update(block)
        offset += len(block)
    return found.hexdigest()


def _memory_path(identity: Identity) -> Path:
    """Return the file that remembers a digest; its name has size, inode and both change times."""
    return settings().cache_dir / "contents" / identity.key.replace(":", "-")


def _remembered(memory: Path) -> str | None:
    try:
        content = memory.read_bytes()
    except OSError:
        return None
    return content.decode() if _SHA256.fullmatch(content) else None


def _remember(memory: Path, digest: str) -> None:
    """Write a digest's file in one step; if that fails, the next load reads the file again."""
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        with replacing(memory) as file:
            file.write(digest.encode())
