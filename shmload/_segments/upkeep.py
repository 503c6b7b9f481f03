"""What a user does with resident segments: pin, unpin, verify and remove them; collect garbage."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from shmload._checkpoints.header import Header
from shmload._checkpoints.wanted import is_publication
from shmload._segments.eviction import evictable
from shmload._segments.listing import SegmentInfo, Segments, segments, segments_by_lock, users_of
from shmload._segments.models import find_models, select
from shmload._segments.names import unfinished_names
from shmload._segments.pieces import combine_digests, piece_ranges
from shmload._segments.removal import (
    attached,
    is_free,
    remove_expired,
    remove_idle,
    remove_leftovers,
)
from shmload._segments.segment import Segment
from shmload._segments.view import dead_views
from shmload._wording import name_processes
from shmload.errors import ArgumentError, SegmentBusy, SegmentCorrupt

_BLOCK_NBYTES = 1 << 20

_Patterns = Sequence[str | os.PathLike[str]]


def verify(*patterns: str | os.PathLike[str]) -> Segments:
    """Recompute the digests of resident segments; reads all their bytes.

    Args:
        patterns: as for `evict`; none means all.

    Returns:
        The segments that were checked; all are sound.

    Raises:
        SegmentCorrupt: a segment's bytes are not those that were decoded; names the first.
        SegmentNotFound: as `evict`.
    """
    sound = []
    for info, error in verify_each(*patterns):
        if error:
            raise error
        sound.append(info)
    return Segments(sound)


def verify_each(
    *patterns: str | os.PathLike[str],
) -> Iterator[tuple[SegmentInfo, SegmentCorrupt | None]]:
    """Do what `verify` does, one segment at a time; yield each with its error, if it has one."""
    for info in select(patterns):
        error = None
        with attached(info.name) as segment:
            try:
                if segment:
                    check_digest(segment)
            except SegmentCorrupt as exc:
                error = exc
        yield info, error


def check_digest(segment: Segment) -> None:
    """Recompute one segment's digest, on all cores.

    Raises:
        SegmentCorrupt: it differs from the one in the header.
    """
    header = segment.read_header()
    written = segment.read_metadata().digest
    got = digest_data(segment.fd, header)
    if got != written:
        raise segment.corrupt(f"its digest is {got} and should be {written}")


def evict(*patterns: str | os.PathLike[str]) -> Segments:
    """Remove models or segments that no process uses.

    A process uses what it is attached to, or maps without being attached; only processes of this
    user count.

    Args:
        patterns: each the name of a model (as `models()` has it) or a part of it that no other
            model has, the id of a model or segment, a segment's name, or the path of a file or of a
            directory above it.

    Returns:
        The segments that were removed.

    Raises:
        ArgumentError: no pattern is given.
        SegmentNotFound: a pattern matches nothing.
        SegmentBusy: some are in use, by a process or a publication; the others are removed.
    """
    if not patterns:
        raise ArgumentError("evict() needs the names or sources of what to remove")
    return evict_segments(select(patterns, segments_by_lock()))


def evict_segments(chosen: Sequence[SegmentInfo]) -> Segments:
    """Remove segments that no process uses, as `evict` does.

    Args:
        chosen: from a listing; those that have gone since are left out.

    Returns:
        Those that were removed, and what was built of them.

    Raises:
        SegmentBusy: some are in use; the others are removed.
    """
    # A publication goes before what it needs, and is younger.
    chosen = sorted(chosen, key=lambda info: info.created_at, reverse=True)
    names = {info.name for info in chosen}
    # What a load has built goes with its weights, and stays while these are in use.
    along = {
        info.name: info
        for info in segments_by_lock()
        if info.kept and not info.is_pinned and not names.isdisjoint(info.needs)
    }
    look = remove_idle([info.name for info in chosen if info.name not in along])
    known = {info.name: info for info in chosen} | along
    removed = Segments(known[name] for name in look.idle if name in known)
    staying = [*look.used, *look.locked]
    if staying:
        raise SegmentBusy(
            _why_busy(staying, chosen),
            names=tuple(staying),
            removed=tuple(info.name for info in removed),
        )
    return removed


def _why_busy(staying: Sequence[str], chosen: Sequence[SegmentInfo]) -> str:
    """Say who uses segments, and what to do about it.

    Args:
        staying: names of the segments that are in use.
        chosen: all that were to go.
    """
    needed = {info.name: info.needed_by for info in segments_by_lock()}
    used = users_of(staying)
    called = {info.name: each.full_name for each in find_models(chosen) for info in each.segments}
    held: dict[str, None] = {}  # in order, each once
    remedies: dict[str, None] = {}
    for name in staying:
        by, remedy = name_processes(used.get(name, ())), "end that process, then try again"
        if os.getpid() in used.get(name, ()):
            # Pipelines refer to themselves: a dropped one stays until a collection.
            remedy = "in this process drop the models, then call `gc.collect()` and try again"
        if needed.get(name):
            by = ", ".join(map(_name_need, needed[name]))
            remedy = ", or ".join(f"`shmload rm {each}`" for each in needed[name])
        held[f"{called.get(name, name)} by {by}"] = None
        remedies[remedy] = None
    return f"still in use: {', '.join(held)}; {', or '.join(remedies)}"


def _name_need(name: str) -> str:
    return f"the publication {name}" if is_publication(name) else f"what was built of it, {name}"


def collect_garbage() -> list[str]:
    """Remove what can never be used again.

    These are parts whose builder died, views whose process died, and segments that no process uses
    and that were shared, or whose shard has changed or is gone, or whose time is over
    (`warm(keep_for=)`). Pinned segments stay: their disk may only be away for a while.

    Returns:
        The names that were removed.
    """
    outdated = [info.name for info in segments_by_lock()[::-1] if not info.is_current]
    # Under the lock: it may have been pinned meanwhile.
    gone = remove_idle(outdated, condition=lambda segment: not segment.is_pinned).idle
    return [*gone, *remove_expired(), *remove_leftovers()]


def find_garbage() -> list[str]:
    """Return the names that `collect_garbage` would remove; remove nothing.

    Holds each segment's lock for a moment; a process that wants the lock waits that long.
    """
    idle = evictable(segments())
    due = {info.name for info in idle if info.is_shared or info.is_due or not info.is_current}
    unused = [
        info.name
        for info in idle
        if info.name in due or (info.kept and not due.isdisjoint(info.needs))
    ]
    parts = filter(is_free, unfinished_names())
    return [*unused, *parts, *dead_views()]


def digest_data(fd: int, header: Header) -> str:
    """Read all data of a segment, on all cores, and return its digest."""
    # Both pread and the hash release the interpreter lock, so threads suffice.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pieces = piece_ranges(header.data_offset, header.data_nbytes)
        return combine_digests(pool.map(lambda piece: _digest(fd, *piece), pieces))


def _digest(fd: int, offset: int, nbytes: int) -> bytes:
    digest = xxhash.xxh3_128()
    end = offset + nbytes
    for begin in range(offset, end, _BLOCK_NBYTES):
        digest.update(os.pread(fd, min(_BLOCK_NBYTES, end - begin), begin))
    return digest.digest()


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
    """
    return _change(patterns, "pin", Segment.pin)


def unpin(*patterns: str | os.PathLike[str]) -> Segments:
    """Undo `pin`: the segments stay resident, and may be evicted to make room.

    Args:
        patterns: as for `evict`.

    Returns:
        The segments, which are not pinned now.

    Raises:
        ArgumentError: no pattern is given.
        SegmentNotFound: as `pin`.
    """
    return _change(patterns, "unpin", Segment.unpin)


def move_pins(to: Iterable[Segment]) -> None:
    """Move the pins of earlier versions of changed files, if they are pinned, to the present ones.

    Args:
        to: segments of the present files; a pin moves to the one of the same dtype.
    """
    outdated = {(info.source, info.conversion): info.name for info in pinned_outdated()}
    for segment in to if outdated else ():
        header = segment.read_metadata()
        name = outdated.get((header.source, header.conversion))
        if name:
            segment.pin()
            with attached(name) as old:
                if old:
                    old.unpin()


def pinned_outdated() -> list[SegmentInfo]:
    """Return the pinned segments whose files have changed or are gone: `gc` leaves them."""
    return [info for info in segments_by_lock() if info.is_pinned and not info.is_current]


def _change(patterns: _Patterns, verb: str, mark: Callable[[Segment], None]) -> Segments:
    """Pin or unpin segments; return those that were still there."""
    if not patterns:
        raise ArgumentError(f"{verb}() needs the names or sources of what to {verb}")
    changed = Segments()
    for info in select(patterns):
        with attached(info.name) as segment:
            if segment:
                mark(segment)
                is_pinned = verb == "pin"
                changed.append(msgspec.structs.replace(info, is_pinned=is_pinned, is_shared=False))
    return changed
