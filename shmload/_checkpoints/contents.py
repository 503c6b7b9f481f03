"""The identity that all copies of a file have: the sha256 of its bytes, remembered by inode.

Guarantee: a digest is used only for a file that has not changed since it was read. It is the name
of the file's blob in a hub cache, so a copy also shares what was decoded from there.
"""

import hashlib
import os

import msgspec

from shmload._checkpoints.identity import Identity, identify
from shmload._host.memo import Memo

_BLOCK_NBYTES = 1 << 20
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
    memo = _memo(identity)
    digest = memo.read()
    if digest is None and may_read:
        digest = _digest(fd)
        if identify(identity.path, os.fstat(fd)).key != identity.key:
            return identity
        memo.write(digest)
    return identity if digest is None else _with_digest(identity, digest)


def known_content(identity: Identity) -> Identity:
    """Return the identity that a file shares with its copies, if its digest is remembered.

    Args:
        identity: of the file, from `identify`; returned if the digest is not known.
    """
    if identity.stamp.startswith(_STAMP):
        return identity
    digest = _memo(identity).read()
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


def _memo(identity: Identity) -> Memo[str]:
    return Memo("contents", str, identity.key)
