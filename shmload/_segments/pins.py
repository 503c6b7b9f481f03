"""Pinning: segments that are never evicted to make room, nor because they are idle."""

import os
from collections.abc import Callable, Iterable, Sequence

import msgspec

from shmload._segments.listing import SegmentInfo, Segments, segments_by_lock
from shmload._segments.removal import give_back
from shmload._segments.segment import Segment, attach
from shmload._segments.selection import select
from shmload._segments.view_register import views_by_segment
from shmload.errors import ArgumentError, SegmentProtected

_Patterns = Sequence[str | os.PathLike[str]]


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
    return _change(select(_some(patterns, "pin")), Segment.pin, is_pinned=True)


def unpin(*patterns: str | os.PathLike[str]) -> Segments:
    """Undo `pin`: the segments stay resident, and may be evicted to make room.

    Segments that a model shares with another pinned model are unpinned too. Those that a view
    directory needs stay pinned until that is removed.

    Args:
        patterns: as for `evict`.

    Returns:
        The segments, which are not pinned now.

    Raises:
        ArgumentError: no pattern is given.
        SegmentNotFound, AmbiguousName: as `pin`.
        SegmentProtected: some stay pinned for a view directory; the others are unpinned.
    """
    unpinned = _change(select(_some(patterns, "unpin")), Segment.unpin, is_pinned=False)
    views = views_by_segment()
    protected = sorted(info.name for info in unpinned if info.name in views)
    if protected:
        raise SegmentProtected(
            protected, sorted({each for name in protected for each in views[name]})
        )
    return unpinned


def move_pins(to: Iterable[Segment], *, are_pinned: bool = True) -> list[str]:
    """Take the pins from earlier versions of changed files, for the segments of the present ones.

    Args:
        to: segments; each is pinned if an earlier version of its file is, in the same dtype.
        are_pinned: False to take the pins only.

    Returns:
        The names of the segments that lost their pins: `gc` removes them.
    """
    protected = views_by_segment()
    outdated = [info for info in pinned_outdated() if info.name not in protected]
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


def _some(patterns: _Patterns, verb: str) -> _Patterns:
    if not patterns:
        raise ArgumentError(f"{verb}() needs the names or sources of what to {verb}")
    return patterns


def _change(
    chosen: Iterable[SegmentInfo], mark: Callable[[Segment], None], *, is_pinned: bool
) -> Segments:
    return Segments(
        msgspec.structs.replace(info, is_pinned=is_pinned, is_shared=False)
        for info in chosen
        if _change_one(info.name, mark)  # else it went meanwhile
    )
