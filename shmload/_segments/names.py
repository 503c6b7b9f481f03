"""The names of this user's segments in /dev/shm, and the identity of a file, which one is made of.

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

from shmload._host.descriptors import close, try_lock
from shmload._host.private import belongs_here
from shmload._host.shm import is_named, shm_names, shm_open, shm_unlink

FORMAT_VERSION = 3
"""Raised whenever a segment's layout or conversion changes: old segments are then not found."""

_KEY_NBYTES = 15
_KEY = re.compile(f"[0-9a-f]{{{2 * _KEY_NBYTES}}}")
_SHORT_NCHARS = 8
_PART_SUFFIX = ".part"
_VIEW_INFIX = "view-"

_HUB_BLOB = re.compile(r".*/blobs/([0-9a-f]{64})", re.DOTALL)
# Whatever the cache is called: listings show segments of other caches, too.
_MIRROR_BLOB = re.compile(r".*/remote/[0-9a-f]{20}/blobs/[0-9a-f]{32}", re.DOTALL)


def identify(path: str | os.PathLike[str], found: os.stat_result) -> str:
    """Return the text that is another one for each file, and for a file after each change.

    All symbolic and hard links to one file have the same identity, so two snapshots of a hub cache
    share it. The inode number alone is not enough: ext4 reuses a number at once. A blob in the
    mirror of a bucket is identified by its name, a digest of the object's URL, ETag and size: the
    file is only a pointer, and each load changes its times. A blob of a hub cache is a file like
    others: one that was damaged and downloaded again must not keep its damaged segment.

    Args:
        path: of the file, or of a link to it.
        found: what stat says of the file.
    """
    real = os.path.realpath(path)
    # Another user may have given any name to any bytes.
    if belongs_here(found) and _MIRROR_BLOB.fullmatch(real):
        return f"{found.st_size}:object={os.path.basename(real)}"
    times = f"{found.st_mtime_ns}.{found.st_ctime_ns}"
    return f"{found.st_size}:{found.st_dev}.{found.st_ino}.{times}"


def identify_anywhere(path: str | os.PathLike[str], found: os.stat_result) -> str:
    """Return text that tells a file apart on other hosts and after years, not only here and now.

    A blob in a hub cache of this user or of root keeps it when it is copied or downloaded again:
    the sha256 by which the hub names it, and its size. Its bytes are not compared with that name.
    Another file has what `identify` returns, whose arguments are the same.
    """
    blob = _HUB_BLOB.fullmatch(os.path.realpath(path))
    if blob and belongs_here(found):
        return f"{found.st_size}:sha256={blob[1]}"
    return identify(path, found)


def segment_name(identity: str, conversion: str) -> str:
    """Return the name of the segment that holds a shard after a conversion.

    Args:
        identity: of the shard.
        conversion: a text that is the same exactly when the conversion is.
    """
    return _name_of(f"{FORMAT_VERSION}\n{identity}\n{conversion}")


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
