"""The names of this user's segments in /dev/shm.

shmload-UID-KEY             a segment; KEY is 30 hexadecimal digits
shmload-UID-KEY.part        its part, while the segment is being built
shmload-UID-room.part       empty; locked by the load that looks for room
shmload-UID-mode.part       empty; locked by the process that changes a segment's mode
shmload-UID-service.part    what the running service says of itself; locked by it
shmload-UID-view-RANDOM     a view: a directory that looks like a checkpoint

The room, mode and service files exist only while a process holds their lock. If that process dies,
they are removed as leftover parts are.
"""

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator

from shmload._checkpoints.identity import Identity
from shmload._host.descriptors import close, try_lock
from shmload._host.shm import is_named, shm_names, shm_open, shm_unlink

FORMAT_VERSION = 3
"""Raised whenever a segment's layout or conversion changes: old segments are then not found."""

_KEY_NBYTES = 15
_KEY = re.compile(f"[0-9a-f]{{{2 * _KEY_NBYTES}}}")
_SHORT_NCHARS = 8
_PART_SUFFIX = ".part"
_VIEW_INFIX = "view-"


def segment_name(identity: Identity, conversion: str) -> str:
    """Return the name of the segment that holds a shard after a conversion.

    Args:
        identity: of the shard.
        conversion: a text that is the same exactly when the conversion is.
    """
    return _name_of(f"{FORMAT_VERSION}\n{identity.key}\n{conversion}")


def publication_name(source: str) -> str:
    """Return the name of the segment that is one version of a publication.

    Args:
        source: such as `shm:NAME@1`.
    """
    return _name_of(f"{FORMAT_VERSION}\n{source}")


def built_name(digest: str) -> str:
    """Return the name of the segment that keeps a built object.

    Args:
        digest: of all that the object depends on.
    """
    return _name_of(f"{FORMAT_VERSION}\nbuilt\n{digest}")


def _name_of(text: str) -> str:
    key = hashlib.blake2b(text.encode(), digest_size=_KEY_NBYTES).hexdigest()
    return f"{name_prefix()}{key}"


def short_id(segment: str) -> str:
    """Return the beginning of a segment's key, which tells it apart and can be typed."""
    return segment.removeprefix(name_prefix())[:_SHORT_NCHARS]


def part_name(segment: str) -> str:
    """Return the name of a segment's part."""
    return segment + _PART_SUFFIX


def lock_name(what: str) -> str:
    """Return the name whose lock one process at a time holds.

    Args:
        what: for what: `room`, `mode` or `service`.
    """
    return f"{name_prefix()}{what}{_PART_SUFFIX}"


def make_view_name() -> str:
    """Return a random name for a new view."""
    return f"{name_prefix()}{_VIEW_INFIX}{secrets.token_hex(8)}"


def name_prefix() -> str:
    """Return what the names of this user's segments, parts and views start with."""
    return f"shmload-{os.geteuid()}-"


def segment_names() -> Iterator[str]:
    """List the names of the segments that are there now."""
    return filter(_is_of_segment, shm_names())


def part_names() -> Iterator[str]:
    """List the names of the parts that are there now."""
    return (n for n in unfinished_names() if _is_of_segment(n.removesuffix(_PART_SUFFIX)))


def unfinished_names() -> Iterator[str]:
    """List the names of parts, and those that are there for a lock alone."""
    prefix = name_prefix()
    return (n for n in shm_names() if n.startswith(prefix) and n.endswith(_PART_SUFFIX))


def _is_of_segment(name: str) -> bool:
    prefix = name_prefix()
    return name.startswith(prefix) and _KEY.fullmatch(name, len(prefix)) is not None


def view_names() -> Iterator[str]:
    """List the names of the views that exist now."""
    prefix = name_prefix() + _VIEW_INFIX
    return (name for name in shm_names() if name.startswith(prefix))


@contextlib.contextmanager
def try_turn(what: str) -> Iterator[bool]:
    """Hold the lock of a name inside the block, if it is free; never wait.

    Args:
        what: as for `lock_name`.

    Yields:
        Whether this process has the turn.

    Raises:
        SegmentUntrusted: the name belongs to another user.
        SharedMemoryFull: /dev/shm has no inodes left.
    """
    name = lock_name(what)
    fd = shm_open(name, create=True, writable=True)
    assert fd is not None, "created if missing"
    try:
        # Between open and lock its holder may have removed it.
        is_mine = try_lock(fd, exclusive=True) and is_named(fd, name)
        try:
            yield is_mine
        finally:
            if is_mine:
                shm_unlink(name)
    finally:
        close(fd)
