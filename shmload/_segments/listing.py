"""What is resident: listing, checking, evicting and cleaning up segments.

The names in /dev/shm are the registry; each segment's header says what it is.
"""

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator

import msgspec

from shmload._checkpoints.identity import PART_SUFFIX, identify, name_prefix
from shmload._host.linux import (
    SHM_DIR,
    inode_of,
    is_named,
    shm_open,
    shm_unlink,
    try_lock,
    wait_lock,
)
from shmload._host.procfs import lock_holders
from shmload._segments.digest import digest_data
from shmload._segments.layout import read_digest
from shmload._segments.segment import Segment, attach, is_shared
from shmload._segments.view import VIEW_INFIX, VIEW_MARK
from shmload._wording import printable
from shmload.errors import (
    ArgumentError,
    SegmentBusy,
    SegmentCorrupt,
    SegmentError,
    SegmentNotFound,
    SegmentUntrusted,
)

# A view is a directory for a moment before it has its lock and its mark.
_VIEW_GRACE_S = 60.0


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a resident segment's header and lock say."""

    name: str
    source: str
    """The shard that was decoded."""
    conversion: str
    """What was done to its dtypes, or `raw`; `corrupt` if the header cannot be read."""
    nbytes: int
    """Size of the segment, in bytes."""
    created_at: float
    """Seconds since the epoch."""
    creator: str
    """Version and process that decoded it."""
    digest: str
    """Of the data: XXH3-128 of the XXH3-128 of each 64 MiB."""
    is_leased: bool
    """Whether some process is attached."""
    is_current: bool
    """Whether the shard on disk is still the one that was decoded."""
    used_at: float
    """When it was last decoded or attached, in seconds since the epoch."""
    is_pinned: bool
    """Whether the service never evicts it to make room."""
    is_shared: bool = False
    """Whether it goes by itself when nobody is attached any more."""


def make_metadata(source: str, identity: str, conversion: str) -> dict[str, str]:
    """Return what a segment's header says beside the shard's own metadata."""
    from shmload import __version__

    return {
        "shmload.source": printable(source),
        "shmload.identity": identity,
        "shmload.conversion": conversion,
        "shmload.created_at": f"{time.time():.3f}",
        "shmload.creator": f"shmload {__version__} pid {os.getpid()}",
    }


def segments() -> list[SegmentInfo]:
    """List this user's resident segments, oldest first.

    A segment that is evicted while this looks is left out.
    """
    found = []
    for name in _resident_names():
        with contextlib.suppress(SegmentError):
            fd = shm_open(name)
            if fd is not None:
                with Segment(name, fd) as segment:
                    # No lock meanwhile, or who gives the last lease back would take it for one.
                    info = _describe(segment)
                    if is_named(fd, name):
                        found.append(info)
    return sorted(found, key=lambda info: (info.created_at, info.name))


def verify(*patterns: str | os.PathLike[str]) -> list[SegmentInfo]:
    """Recompute the digests of resident segments; reads all their bytes.

    Args:
        patterns: names of segments, or paths of sources, as for `evict`; none means all.

    Returns:
        The segments that were checked: all are sound.

    Raises:
        SegmentCorrupt: the first whose bytes are not those that were decoded.
        SegmentNotFound: a pattern matches nothing.
    """
    return list(verify_each(*patterns))


def verify_each(*patterns: str | os.PathLike[str]) -> Iterator[SegmentInfo]:
    """Do what `verify` does, one segment at a time; yields those that are sound."""
    for info in _select(patterns):
        segment = attach(info.name)
        if segment:
            try:
                check_digest(segment)
            finally:
                give_back(segment)
        yield info


def check_digest(segment: Segment) -> None:
    """Recompute one segment's digest, on all cores.

    Raises:
        SegmentCorrupt: it is not the one in the header.
    """
    header = segment.read_header()
    wanted = read_digest(header.metadata)
    got = digest_data(segment.fd, header)
    if got != wanted:
        raise SegmentCorrupt(segment.name, f"its digest is {got} and should be {wanted}")


def evict(*patterns: str | os.PathLike[str]) -> list[SegmentInfo]:
    """Remove resident segments that nobody is attached to.

    Args:
        patterns: each a segment's name, or the path of a shard or of a directory above it.

    Returns:
        What was removed.

    Raises:
        ArgumentError: no pattern is given.
        SegmentNotFound: a pattern matches nothing.
        SegmentBusy: some are leased; the others are removed.
    """
    if not patterns:
        raise ArgumentError("evict() needs the names or sources of what to remove")
    removed: list[SegmentInfo] = []
    busy: list[SegmentInfo] = []
    for info in _select(patterns):
        (removed if remove_if_free(info.name) else busy).append(info)
    if busy:
        known = holders(info.name for info in busy)
        pids = {info.name: known.get(info.name, set()) for info in busy}
        raise SegmentBusy(pids, (info.name for info in removed))
    return removed


def holders(names: Iterable[str]) -> dict[str, set[int]]:
    """Return which processes hold segments, as far as this process can see them.

    Not named are those of another pid namespace, and those that inherited what they hold.
    """
    found = {}
    locks = lock_holders()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inode = inode_of(os.stat(SHM_DIR / name, follow_symlinks=False))
            if inode in locks:
                found[name] = locks[inode]
    return found


def collect_garbage() -> list[str]:
    """Remove what can never be used again.

    That is parts whose builder died, views whose process died, and of the segments that nobody is
    attached to those that were shared, or whose shard has changed or is gone.

    Returns:
        The names that were removed.
    """
    removed = [
        info.name for info in segments() if not info.is_current and remove_if_free(info.name)
    ]
    return [*removed, *remove_leftovers()]


def find_garbage() -> list[str]:
    """Return the names that `collect_garbage` would remove, and leave them.

    What is looked at is held for a moment, so whoever wants it then waits as long.
    """
    unused = (
        info.name
        for info in segments()
        if not info.is_leased and (info.is_shared or not info.is_current)
    )
    parts = filter(_is_free, _names_of_parts())
    return [*unused, *parts, *filter(_is_dead_view, _names_of_views())]


def remove_leftovers() -> list[str]:
    """Remove what processes that died should have removed, and return the names.

    That is the parts of which they were builders, the segments that they shared, and their views.
    """
    # Nobody lists parts, so who holds one is building it.
    parts = (name for name in _names_of_parts() if remove_if_free(name, patience_s=0))
    return [*parts, *filter(remove_if_unused, _resident_names()), *remove_dead_views()]


def remove_dead_views() -> list[str]:
    """Remove the views of processes that have died, and return the names."""
    return list(filter(_remove_view, _names_of_views()))


def _names_of_parts() -> list[str]:
    names = os.listdir(SHM_DIR)
    return [n for n in names if n.startswith(name_prefix()) and n.endswith(PART_SUFFIX)]


def _names_of_views() -> list[str]:
    return [n for n in os.listdir(SHM_DIR) if n.startswith(name_prefix() + VIEW_INFIX)]


def _resident_names() -> Iterator[str]:
    pattern = re.compile(re.escape(name_prefix()) + "[0-9a-f]{30}")
    return (name for name in os.listdir(SHM_DIR) if pattern.fullmatch(name))


def _describe(segment: Segment) -> SegmentInfo:
    try:
        metadata = segment.read_header().metadata or {}
        created_at = float(metadata.get("shmload.created_at", 0))
    except (SegmentCorrupt, ValueError):
        metadata, created_at = {"shmload.conversion": "corrupt"}, 0.0
    source = metadata.get("shmload.source", "")
    try:
        is_current = identify(source, os.stat(source)).key == metadata.get("shmload.identity")
    except (OSError, ValueError):
        is_current = False
    stat_of = os.fstat(segment.fd)
    return SegmentInfo(
        name=segment.name,
        source=source,
        conversion=metadata.get("shmload.conversion", ""),
        nbytes=segment.nbytes,
        created_at=created_at,
        creator=metadata.get("shmload.creator", ""),
        digest=read_digest(metadata) or "",
        is_leased=not try_lock(segment.fd, exclusive=True),
        is_current=is_current,
        used_at=stat_of.st_mtime,
        is_pinned=bool(stat_of.st_mode & stat.S_ISVTX),
        is_shared=is_shared(stat_of),
    )


def _select(patterns: tuple[str | os.PathLike[str], ...]) -> list[SegmentInfo]:
    found = segments()
    if not patterns:
        return found
    chosen = {}
    for pattern in patterns:
        matching = [info for info in found if _matches(info, os.fspath(pattern))]
        if not matching:
            raise SegmentNotFound(os.fspath(pattern))
        chosen.update({info.name: info for info in matching})
    return list(chosen.values())


def _matches(info: SegmentInfo, pattern: str) -> bool:
    """Tell whether a pattern is a segment's name, or its shard's path or a directory above it."""
    if info.name == pattern:
        return True
    if not pattern or not info.source:  # an empty path would be the current directory
        return False
    for resolve in (os.path.abspath, os.path.realpath):
        try:
            path, source = printable(resolve(pattern)), resolve(info.source)
        except ValueError:  # no file has a zero byte in its name
            return False
        if source == path or source.startswith(path + os.sep):
            return True
    return False


def remove_if_free(name: str, patience_s: float = 0.2) -> bool:
    """Remove a segment or part unless somebody holds it; returns whether it was removed.

    Args:
        name: of it.
        patience_s: whoever lists segments holds each for a moment; how long to wait, in seconds.
    """
    with _hold(name, patience_s) as fd:
        if fd is not None:
            shm_unlink(name)
    return fd is not None


def remove_if_unused(name: str) -> bool:
    """Remove a shared segment unless somebody holds it; returns whether it was removed.

    One that somebody has made resident meanwhile stays.
    """
    with _hold(name, patience_s=0) as fd:
        is_over = fd is not None and is_shared(os.fstat(fd))
        if is_over:
            shm_unlink(name)
    return is_over


def give_back(segment: Segment) -> None:
    """Close a segment, and have it go if it is shared and that was its last lease."""
    may_be_last = segment.fd >= 0 and segment.is_shared
    segment.close()
    if may_be_last:
        remove_if_unused(segment.name)


def _is_free(name: str) -> bool:
    with _hold(name) as fd:
        return fd is not None


@contextlib.contextmanager
def _hold(name: str, patience_s: float = 0.2) -> Iterator[int | None]:
    """Keep others from a segment or part.

    Args:
        name: of it.
        patience_s: whoever lists segments holds each for a moment; how long to wait, in seconds.

    Yields:
        Its descriptor, if it is there and nobody else holds it.
    """
    try:
        fd = shm_open(name)
    except SegmentUntrusted:
        fd = None
    if fd is None:
        yield None
        return
    try:
        is_free = wait_lock(fd, exclusive=True, timeout_s=patience_s) and is_named(fd, name)
        yield fd if is_free else None
    finally:
        os.close(fd)


def _remove_view(name: str) -> bool:
    with _hold_view(name) as is_mine:
        if is_mine:
            shutil.rmtree(SHM_DIR / name, ignore_errors=True)
    return is_mine


def _is_dead_view(name: str) -> bool:
    with _hold_view(name) as is_mine:
        return is_mine


@contextlib.contextmanager
def _hold_view(name: str) -> Iterator[bool]:
    """Keep others from a view; yields whether it is of this user and its process has died."""
    try:
        fd = os.open(SHM_DIR / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        found = os.fstat(fd)
        # One from the future is old: the clock was set back.
        is_new = 0 <= time.time() - found.st_mtime < _VIEW_GRACE_S
        is_young = is_new and not found.st_mode & VIEW_MARK
        is_ours = found.st_uid == os.geteuid()
        yield is_ours and not is_young and try_lock(fd, exclusive=True)
    finally:
        os.close(fd)
