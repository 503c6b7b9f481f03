"""Pinning: segments that are never evicted to make room, nor because they are idle."""

import os
from collections.abc import Callable, Iterable, Sequence

import msgspec

from shmload._segments.listing import SegmentInfo, Segments, segments_by_lock
from shmload._segments.removal import give_back
from shmload._segments.segment import Segment, attach
from shmload._segments.selection import select
from shmload.errors import ArgumentError


def pin(*patterns: str | os.PathLike[str]) -> Segments:
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


def unpin(*patterns: str | os.PathLike[str]) -> Segments:
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


def move_pins(to: Iterable[Segment], *, are_pinned: bool = True) -> list[str]:
    """Take the pins from earlier versions of changed files, for the segments of the present ones.

    Args:
        to: segments; each is pinned if an earlier version of its file is, in the same dtype.
        are_pinned: False to take the pins only.

    Returns:
        The names of the segments that lost their pins: `gc` removes them.
    """
    outdated = pinned_outdated()
    lost = []
    for segment in to if outdated else ():
        header = segment.read_metadata()
        for info in outdated:
            if (info.source, info.conversion) == (header.source, header.conversion):
                if are_pinned:
                    segment.pin()
                _change_one(info.name, Segment.unpin)
                lost.append(info.name)
    return lost


def pinned_outdated() -> list[SegmentInfo]:
    """Return the pinned segments whose files have changed or are gone: `gc` leaves them."""
    return [info for info in segments_by_lock() if info.is_pinned and not info.is_current]


def _change_one(name: str, mark: Callable[[Segment], None]) -> bool:
    """Change a segment; return whether it is still there."""
    segment = attach(name)
    if not segment:
        return False
    try:
        mark(segment)
    finally:
        give_back(segment)
    return True


def _mark(
    verb: str,
    patterns: Sequence[str | os.PathLike[str]],
    mark: Callable[[Segment], None],
    *,
    is_pinned: bool,
) -> Segments:
    if not patterns:
        raise ArgumentError(f"{verb}() needs the names or sources of what to {verb}")
    return Segments(
        msgspec.structs.replace(info, is_pinned=is_pinned, is_shared=False)
        for info in select(patterns)
        if _change_one(info.name, mark)  # else it went meanwhile
    )
