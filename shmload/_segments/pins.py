"""Pinning: segments that are never evicted to make room, nor because they are idle."""

import os
from collections.abc import Callable, Sequence

import msgspec

from shmload._segments.listing import SegmentInfo
from shmload._segments.removal import give_back
from shmload._segments.segment import Segment, attach
from shmload._segments.selection import select
from shmload.errors import ArgumentError


def pin(*patterns: str | os.PathLike[str]) -> list[SegmentInfo]:
    """Pin resident models or segments: they are never evicted to make room, nor when idle.

    `evict` still removes them. A pin belongs to the segment, not to the process, and lasts until
    `unpin`, `evict` or a reboot.

    Args:
        patterns: as for `evict`.

    Returns:
        The segments that are pinned now.

    Raises:
        ArgumentError: no pattern is given.
        SegmentNotFound: a pattern matches nothing; `warm(pin=True)` decodes and pins a source.
        AmbiguousName: a pattern is a part of several models' names.
    """
    return _mark("pin", patterns, Segment.pin, is_pinned=True)


def unpin(*patterns: str | os.PathLike[str]) -> list[SegmentInfo]:
    """Undo `pin`: the segments stay resident, and may be evicted to make room.

    Segments that a model shares with another pinned model are unpinned too.

    Args:
        patterns: as for `evict`.

    Returns:
        The segments, which are not pinned now.

    Raises:
        ArgumentError: no pattern is given.
        SegmentNotFound, AmbiguousName: as `pin`.
    """
    return _mark("unpin", patterns, Segment.unpin, is_pinned=False)


def _mark(
    verb: str,
    patterns: Sequence[str | os.PathLike[str]],
    mark: Callable[[Segment], None],
    *,
    is_pinned: bool,
) -> list[SegmentInfo]:
    if not patterns:
        raise ArgumentError(f"{verb}() needs the names or sources of what to {verb}")
    marked = []
    for info in select(patterns):
        segment = attach(info.name)
        if segment:  # else it went meanwhile
            try:
                mark(segment)
            finally:
                give_back(segment)
            marked.append(msgspec.structs.replace(info, is_pinned=is_pinned, is_shared=False))
    return marked
