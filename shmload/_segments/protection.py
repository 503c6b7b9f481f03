"""The segments of view directories are pinned, and what a dead process left of one is put in order.

Guarantee: a segment that a directory in the register needs is pinned. It loses that pin when the
last such directory goes, unless the user has pinned it too.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence

import msgspec

from shmload._segments.removal import give_back
from shmload._segments.segment import Segment, attach
from shmload._segments.view_folder import bring_back, discard, read_marker, take_down
from shmload._segments.view_register import (
    ViewEntry,
    ViewRecord,
    changing_register,
    changing_view,
    read_entry,
    view_entries,
    write_entry,
)
from shmload._wording import logger_of
from shmload.errors import SegmentRemoved, ShmloadError, ViewBusy, ViewUnwritable

logger = logger_of(__name__)


def protect(pending: ViewRecord, staging: str, segments: Sequence[Segment]) -> None:
    """Record that a directory is being built, and pin what it needs. Hold `changing_view`.

    Args:
        pending: what is built.
        staging: where.
        segments: those of the record; stay the caller's.

    Raises:
        SegmentRemoved: one was removed meanwhile.
        ViewBusy, ViewUnwritable: as `changing_register`.
    """
    with changing_register():
        entry = read_entry(pending.directory)
        entry = msgspec.structs.replace(entry, pending=pending, staging=staging)
        _pin_for(entry, segments)


def protect_again(entry: ViewEntry, segments: Sequence[Segment]) -> None:
    """Pin what a directory that is as it should be needs: a restart has emptied /dev/shm.

    Raises:
        SegmentRemoved, ViewBusy, ViewUnwritable: as `protect`.
    """
    with changing_register():
        _pin_for(read_entry(entry.directory), segments)


def _pin_for(entry: ViewEntry, segments: Sequence[Segment]) -> None:
    others = [each for each in view_entries() if each.directory != entry.directory]
    known = {name for each in (*others, entry) for name in each.protected}
    pinned = {name for each in (*others, entry) for name in each.pinned}
    for segment in segments:
        if segment.is_pinned and segment.name not in known:
            pinned.add(segment.name)
    names = {*entry.protected, *(segment.name for segment in segments)}
    write_entry(
        msgspec.structs.replace(
            entry, protected=tuple(sorted(names)), pinned=tuple(sorted(pinned & names))
        )
    )
    for segment in segments:
        segment.pin()
        if not segment.has_name:
            raise SegmentRemoved(segment.name)


def note_pins(names: Iterable[str], *, are_pinned: bool) -> dict[str, tuple[str, ...]]:
    """Note which protected segments the user has pinned, or has unpinned.

    Returns:
        The directories that the segments are protected for, by segment; only protected ones.
    """
    wanted = set(names)
    if not any(wanted.intersection(entry.protected) for entry in view_entries()):
        return {}
    found: dict[str, tuple[str, ...]] = {}
    with changing_register():
        for entry in view_entries():
            mine = wanted.intersection(entry.protected)
            pinned = {*entry.pinned} | mine if are_pinned else {*entry.pinned} - mine
            if pinned != {*entry.pinned}:
                write_entry(msgspec.structs.replace(entry, pinned=tuple(sorted(pinned))))
            for name in mine:
                found[name] = (*found.get(name, ()), entry.directory)
    return found


def settle(directory: str) -> ViewEntry:
    """Finish or undo what is under way at a directory. Hold `changing_view`.

    Returns:
        The directory's entry, with nothing under way.

    Raises:
        ViewBusy: as `changing_register`.
        ViewUnwritable: the register or the directory cannot be written.
    """
    entry = read_entry(directory)
    try:
        kept, standing = _settled(entry)
    except OSError as exc:
        if isinstance(exc, ShmloadError):
            raise
        remedy = "what is under way there is finished by the next change of it, or by `shmload gc`"
        raise ViewUnwritable(directory, exc.strerror or str(exc), remedy) from exc
    if kept == directory:
        logger.warning("%s: what shmload did not make stays there", directory)
    elif kept:
        logger.warning("what shmload did not make in %s is in %s now", directory, kept)
    return _release(directory, standing)


def _settled(entry: ViewEntry) -> tuple[str, ViewRecord | None]:
    """Return where the rest of a directory is that was taken down, and what stands."""
    directory = entry.directory
    standing = entry.standing
    kept = ""
    if entry.staging:
        bring_back(entry.staging, directory)
    here = read_marker(directory)
    if entry.is_removed:
        if here and standing and here.build == standing.build:
            os.rename(directory, entry.staging)
        kept = take_down(entry.staging, directory)
        standing = None
    elif entry.pending and here and here.build == entry.pending.build:
        kept = take_down(entry.staging, directory)
        standing = entry.pending
    elif entry.staging:
        discard(entry.staging)
    return kept, standing


def _release(directory: str, standing: ViewRecord | None) -> ViewEntry:
    """Unpin what a directory no longer needs, and write what there is."""
    needed = {*standing.segments} if standing else set()
    with changing_register():
        entry = read_entry(directory)
        others = {
            name
            for each in view_entries()
            if each.directory != directory
            for name in each.protected
        }
        for name in {*entry.protected} - needed - others - {*entry.pinned}:
            _unpin(name)
        held = tuple(name for name in entry.protected if name in needed)
        settled = ViewEntry(
            directory=directory,
            standing=standing,
            protected=held,
            pinned=tuple(name for name in entry.pinned if name in held),
        )
        if settled != entry:
            write_entry(settled)
        return settled


def _unpin(name: str) -> None:
    segment = attach(name)
    if segment:
        try:
            segment.unpin()
        finally:
            give_back(segment)


def adopt(entry: ViewEntry, found: ViewRecord) -> ViewEntry:
    """Record a view directory that the register does not know: it was moved, copied, or forgotten.

    Returns:
        Its entry, as it was until now at another place.

    Raises:
        ViewBusy, ViewUnwritable: as `changing_register`.
    """
    with changing_register():
        adopted = ViewEntry(
            directory=entry.directory,
            standing=msgspec.structs.replace(found, directory=entry.directory),
            protected=found.segments,
        )
        write_entry(adopted)
        return adopted


def forget(entry: ViewEntry) -> None:
    """Record that a directory is no longer there. Hold `changing_view`.

    Raises:
        ViewBusy, ViewUnwritable: as `changing_register`.
    """
    _release(entry.directory, None)


def begin_removal(entry: ViewEntry, staging: str) -> None:
    """Record that a directory is being removed; `settle` does it. Hold `changing_view`.

    Raises:
        ViewBusy, ViewUnwritable: as `changing_register`.
    """
    with changing_register():
        write_entry(msgspec.structs.replace(entry, staging=staging, is_removed=True))


def find_unsettled() -> list[str]:
    """Return the staging paths that `settle_leftovers` would settle; change nothing."""
    found = []
    for entry in _unsettled():
        with contextlib.suppress(ViewBusy), changing_view(entry.directory, 0):
            found.append(entry.staging)
    return found


def _unsettled() -> list[ViewEntry]:
    """Return the entries with something under way, by a process that lives or has died."""
    return [entry for entry in view_entries() if entry.staging]


def settle_leftovers() -> list[str]:
    """Finish or undo what dead processes left of view directories; return the staging paths."""
    settled = []
    for entry in _unsettled():
        try:
            with changing_view(entry.directory, 0):
                settle(entry.directory)
                settled.append(entry.staging)
        except ViewBusy:  # a process is at it
            continue
        except (ShmloadError, OSError) as exc:  # its disk may be away
            logger.warning("%s cannot be put in order: %s", entry.directory, exc)
    return settled
