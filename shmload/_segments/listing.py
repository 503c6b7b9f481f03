"""Listing, verifying and evicting segments, and collecting garbage.

The names in /dev/shm are the only registry; each segment's header says what it holds.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator

import msgspec

from shmload._checkpoints.identity import identify
from shmload._host.linux import SHM_DIR, inode_of, is_named, shm_open, try_lock
from shmload._host.procfs import lock_holders
from shmload._segments.digest import digest_data
from shmload._segments.metadata import Metadata, parse_metadata, read_digest
from shmload._segments.names import part_names, segment_names
from shmload._segments.removal import give_back, is_free, remove_if_free, remove_leftovers
from shmload._segments.segment import Segment, attach, is_protected, is_shared
from shmload._segments.view import dead_views
from shmload._wording import printable
from shmload.errors import (
    ArgumentError,
    SegmentBusy,
    SegmentCorrupt,
    SegmentError,
    SegmentNotFound,
)


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A segment as its header, its lock and its mode describe it."""

    name: str
    source: str
    """Path of the shard that was decoded."""
    conversion: str
    """What was done to its dtypes, or `raw`; `corrupt` if the header cannot be read."""
    nbytes: int
    """Size of the segment, in bytes."""
    created_at: float
    """Seconds since the epoch."""
    creator: str
    """Version and process that decoded it."""
    digest: str
    """XXH3-128 of the XXH3-128 of each 64 MiB of its data."""
    is_leased: bool
    """Whether some process is attached."""
    is_current: bool
    """Whether the shard on disk is still the one that was decoded."""
    used_at: float
    """When it was last decoded or attached, in seconds since the epoch."""
    is_pinned: bool
    """Whether it is protected: the service never evicts it to make room."""
    is_shared: bool = False
    """Whether it is removed with its last lease."""


def segments() -> list[SegmentInfo]:
    """List this user's resident segments, oldest first.

    A segment that is evicted during the listing is left out.
    """
    found = []
    for name in segment_names():
        with contextlib.suppress(SegmentError):
            fd = shm_open(name)
            if fd is not None:
                with Segment(name, fd) as segment:
                    # Hold no lock here: a process releasing the last lease would mistake it for
                    # another lease.
                    info = _describe(segment)
                    if is_named(fd, name):
                        found.append(info)
    return sorted(found, key=lambda info: (info.created_at, info.name))


def verify(*patterns: str | os.PathLike[str]) -> list[SegmentInfo]:
    """Recompute the digests of resident segments; reads all their bytes.

    Args:
        patterns: names of segments, or paths of sources, as for `evict`; none means all.

    Returns:
        The segments that were checked; all are sound.

    Raises:
        SegmentCorrupt: a segment's bytes are not those that were decoded; names the first.
        SegmentNotFound: a pattern matches nothing.
    """
    return list(verify_each(*patterns))


def verify_each(*patterns: str | os.PathLike[str]) -> Iterator[SegmentInfo]:
    """Do what `verify` does, one segment at a time; yield each that is sound."""
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
        SegmentCorrupt: it differs from the one in the header.
    """
    header = segment.read_header()
    wanted = read_digest(header.metadata)
    got = digest_data(segment.fd, header)
    if got != wanted:
        raise SegmentCorrupt(segment.name, f"its digest is {got} and should be {wanted}")


def evict(*patterns: str | os.PathLike[str]) -> list[SegmentInfo]:
    """Remove segments that no process is attached to.

    Args:
        patterns: each a segment's name, or the path of a shard or of a directory above it.

    Returns:
        The segments that were removed.

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
    """Return the ids of the processes that hold segments, by segment.

    The result lacks processes in another pid namespace and processes that inherited a lease.
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

    These are parts whose builder died, views whose process died, and segments that no process is
    attached to and that were shared, or whose shard has changed or is gone.

    Returns:
        The names that were removed.
    """
    removed = [
        info.name for info in segments() if not info.is_current and remove_if_free(info.name)
    ]
    return [*removed, *remove_leftovers()]


def find_garbage() -> list[str]:
    """Return the names that `collect_garbage` would remove; remove nothing.

    Holds each segment's lock for a moment; a process that wants the lock waits that long.
    """
    unused = (
        info.name
        for info in segments()
        if not info.is_leased and (info.is_shared or not info.is_current)
    )
    return [*unused, *filter(is_free, part_names()), *dead_views()]


def _describe(segment: Segment) -> SegmentInfo:
    try:
        metadata = parse_metadata(segment.read_header().metadata)
    except (SegmentCorrupt, ValueError):
        metadata = Metadata(conversion="corrupt")
    try:
        is_current = identify(metadata.source, os.stat(metadata.source)).key == metadata.identity
    except (OSError, ValueError):
        is_current = False
    found = os.fstat(segment.fd)
    return SegmentInfo(
        name=segment.name,
        source=metadata.source,
        conversion=metadata.conversion,
        nbytes=segment.nbytes,
        created_at=metadata.created_at,
        creator=metadata.creator,
        digest=metadata.digest,
        is_leased=not try_lock(segment.fd, exclusive=True),
        is_current=is_current,
        used_at=found.st_mtime,
        is_pinned=is_protected(found),
        is_shared=is_shared(found),
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
