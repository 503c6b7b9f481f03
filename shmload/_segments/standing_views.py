"""The view directories of this user: listed, removed, and put in order after a process has died.

Guarantee: a segment that a directory in the register needs is pinned. It loses that pin when the
last such directory goes, unless the user has pinned it too.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from shmload._segments.listing import segments_by_lock
from shmload._segments.removal import attached
from shmload._segments.segment import Segment, changing_mode
from shmload._segments.view_folder import (
    bring_back,
    discard,
    read_marker,
    staging_for,
    take_down,
)
from shmload._segments.view_register import (
    ViewEntry,
    ViewRecord,
    changing_view,
    read_entry,
    view_entries,
    write_entry,
)
from shmload._settings import settings
from shmload._tables import Cell, Listing, Page, Printable, Table
from shmload._wording import count_of, format_age, format_nbytes, logger_of, printing
from shmload.errors import SegmentRemoved, ShmloadError, ViewBusy, ViewNotFound, ViewUnwritable

logger = logger_of(__name__)

State = Literal["ready", "empty", "changed", "gone", "being made"]
_STYLES = {"ready": "green", "being made": ""}


class ViewDirectory(Printable, msgspec.Struct, frozen=True, kw_only=True):
    """A directory that looks like a source, and whose weights are links to resident segments."""

    directory: str
    """Absolute, without links."""
    source: str
    """An absolute path, or the id of a model on the hub."""
    dtype: str | dict[str, str | None] | None
    """torch's name of the dtype that was asked for, or these by component; None for that of the
    files."""
    components: tuple[str, ...] | None
    """The components whose weights it shares; None for all."""
    variant: str | None
    """The variant that was asked for."""
    segments: tuple[str, ...]
    """Names of its segments."""
    nbytes: int
    """Total size of its segments, in bytes."""
    made_at: float
    """When it was built, in seconds since the epoch."""
    state: State
    """`ready`; `empty`: segments are missing, since a restart; `changed`: the source has changed
    since; `gone`: the directory was moved or deleted; or `being made`."""

    def page(self) -> Page:
        """Return a line for it."""
        amount = f"{format_nbytes(self.nbytes)} in {count_of(len(self.segments), 'segment')}"
        return Page((printing(f"{self.directory}: {self.state}, {self.title}, {amount}"),))

    @property
    def title(self) -> str:
        """Its source and dtype, for people."""
        if isinstance(self.dtype, dict):
            dtype = ", ".join(f"{name}={each}" for name, each in self.dtype.items())
        else:
            dtype = self.dtype or "as stored"
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.source}{variant} ({dtype})"


class ViewDirectories(Listing[ViewDirectory]):
    """The view directories, as a list that is printed as a table."""

    def page(self) -> Page:
        """Return a row for each, and what to do about those that are not ready."""
        rows = [
            (
                each.directory,
                Cell(each.state, _STYLES.get(each.state, "yellow")),
                format_nbytes(each.nbytes),
                format_age(time.time() - each.made_at),
                each.title,
            )
            for each in self
        ]
        titles = ("DIRECTORY", "STATE", "SIZE", "MADE", "SOURCE")
        remedies = [
            f"{each.directory}: {remedy}" for each in self if (remedy := _remedy(each.state))
        ]
        table = [Table(titles=titles, rows=rows, right=(2,))] if rows else []
        return Page((*table, count_of(len(self), "view directory", "view directories"), *remedies))


def _remedy(state: State) -> str:
    return {
        "empty": "its weights are not resident: `shmload warm --views`",
        "changed": "its source has changed: `shmload warm --views`",
        "gone": "it was moved or deleted: `shmload view SOURCE --dir NEW` for the new place, "
        "`shmload warm --views` to make it again, or `shmload view --remove` to forget it",
    }.get(state, "")


def view_directories() -> ViewDirectories:
    """List this user's view directories, in the order of their paths.

    Printed, and in a notebook, the list is the table of `shmload view --list`.
    """
    current = _current_segments()
    return ViewDirectories(describe_view(entry, current) for entry in view_entries())


def _current_segments() -> dict[str, bool]:
    """Return whether the shard of each resident segment is still the one that was decoded."""
    return {info.name: info.is_current for info in segments_by_lock()}


def describe_view(entry: ViewEntry, current: dict[str, bool] | None = None) -> ViewDirectory:
    """Describe one view directory.

    Args:
        entry: of the directory.
        current: whether the shard of each resident segment is as it was; None to look.
    """
    record = entry.standing or entry.pending
    assert record is not None, "an entry without either is not written"
    arguments = record.arguments
    return ViewDirectory(
        directory=entry.directory,
        source=arguments.source,
        dtype=arguments.dtype,
        components=arguments.components,
        variant=arguments.variant,
        segments=record.segments,
        nbytes=record.nbytes,
        made_at=record.made_at,
        state=_state(entry, _current_segments() if current is None else current),
    )


def _state(entry: ViewEntry, current: dict[str, bool]) -> State:
    record = entry.standing
    if record is None:
        return "being made"
    here = read_marker(entry.directory)
    if not here or here.build != record.build:
        return "being made" if entry.staging else "gone"
    if not all(name in current for name in record.segments):
        return "empty"
    return "ready" if all(current[name] for name in record.segments) else "changed"


def known_view(directory: str) -> ViewEntry:
    """Return the entry of a view directory, or that of one which the register does not know.

    Args:
        directory: absolute, without links.

    Raises:
        ViewNotFound: it is none.
    """
    entry = read_entry(directory)
    if not entry.standing and not entry.pending:
        here = read_marker(directory)
        if not here:
            raise _not_found(directory)
        return ViewEntry(directory=directory, standing=here)
    return entry


def _not_found(directory: str) -> ViewNotFound:
    return ViewNotFound(directory, [each.directory for each in view_entries()])


def remove_view_directory(directory: str | os.PathLike[str]) -> ViewDirectory:
    """Remove a view directory; its segments are no longer pinned for it, and stay resident.

    What others have put into the directory stays there. A directory that is gone is forgotten.

    Args:
        directory: of the view.

    Returns:
        What it was.

    Raises:
        ViewNotFound: it is no view directory.
        ViewBusy: another process makes it, for longer than `SHMLOAD_WAIT_TIMEOUT_S`.
        ViewUnwritable: it, or the record of it, cannot be written.
    """
    place = os.path.realpath(os.path.expanduser(os.fspath(directory)))
    known_view(place)
    above = os.path.dirname(place)
    if os.path.isdir(above) and not os.access(above, os.W_OK | os.X_OK):
        raise ViewUnwritable(above, "this user may not", "have its owner remove the view")
    with changing_view(place, settings().wait_timeout_s):
        before = read_entry(place)
        entry = find_standing(place)
        if before.is_removed:  # what had begun is done now
            return describe_view(before)
        if not entry.standing:  # it was being made, and its process has died
            raise _not_found(place)
        found = describe_view(entry)
        write_entry(msgspec.structs.replace(entry, staging=staging_for(place)))
        settle(place)
        return found


def find_standing(place: str) -> ViewEntry:
    """Return a place's entry, with nothing under way. Hold `changing_view`.

    A view directory there that the register does not know, as it was moved, copied or forgotten,
    is recorded.

    Raises:
        As `settle`.
    """
    entry = settle(place)
    here = read_marker(place)
    if here and (not entry.standing or entry.standing.build != here.build):
        standing = msgspec.structs.replace(here, directory=place)
        entry = ViewEntry(directory=place, standing=standing)
        write_entry(entry)
    return entry


def protect(entry: ViewEntry, segments: Sequence[Segment]) -> None:
    """Record what a directory needs, and pin it. Hold `changing_view`.

    Args:
        entry: what stands and what is under way.
        segments: those of it that this process has attached; stay the caller's.

    Raises:
        SegmentRemoved: one was removed meanwhile.
        SegmentTimeout, SharedMemoryFull: as `Segment.pin`.
        ViewUnwritable: the register cannot be written.
    """
    write_entry(entry)  # first: a pin that nothing needs would stay for ever
    for segment in segments:
        segment.pin(for_views=True)
        if not segment.has_name:
            raise SegmentRemoved(segment.name)


def settle(directory: str) -> ViewEntry:
    """Finish or undo what is under way at a directory. Hold `changing_view`.

    Returns:
        The directory's entry, with nothing under way.

    Raises:
        SegmentTimeout, SharedMemoryFull: as `changing_mode`.
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
    settled = ViewEntry(directory=directory, standing=standing)
    if settled != entry:
        release(entry, settled)
    return settled


def _settled(entry: ViewEntry) -> tuple[str, ViewRecord | None]:
    """Return where the rest of a directory is that was taken down, and what stands."""
    directory, standing = entry.directory, entry.standing
    if not entry.staging:
        return "", standing
    bring_back(entry.staging, directory)
    here = read_marker(directory)
    if entry.pending:
        if here and here.build == entry.pending.build:
            return take_down(entry.staging, directory), entry.pending
        discard(entry.staging)
        return "", standing
    if here and standing and here.build == standing.build:
        os.rename(directory, entry.staging)
    return take_down(entry.staging, directory), None


def release(before: ViewEntry, after: ViewEntry) -> None:
    """Record what a directory needs from now on, and unpin what it does not. Hold `changing_view`.

    Raises:
        SegmentTimeout, SharedMemoryFull: as `changing_mode`.
        ViewUnwritable: the register cannot be written.
    """
    with contextlib.ExitStack() as ending:
        given_up = before.needed - after.needed
        segments = [*filter(None, (ending.enter_context(attached(name)) for name in given_up))]
        # Inside, so that of two directories that go at once the later one unpins what both had.
        with changing_mode(before.directory):
            others = [each for each in view_entries() if each.directory != before.directory]
            for segment in segments:
                if not any(segment.name in each.needed for each in others):
                    segment.unpin_for_views()
            write_entry(after)


def find_unsettled() -> list[str]:
    """Return the staging paths that `settle_leftovers` would settle; change nothing."""
    found = []
    for entry in filter(_is_unsettled, view_entries()):
        with contextlib.suppress(ViewBusy), changing_view(entry.directory, 0):
            found.append(entry.staging)
    return found


def settle_leftovers() -> list[str]:
    """Finish or undo what dead processes left of view directories; return the staging paths."""
    settled = []
    for entry in filter(_is_unsettled, view_entries()):
        try:
            with changing_view(entry.directory, 0):
                settle(entry.directory)
                settled.append(entry.staging)
        except ViewBusy:  # a process is at it
            continue
        except (ShmloadError, OSError) as exc:  # its disk may be away
            logger.warning("%s cannot be put in order: %s", entry.directory, exc)
    return settled


def _is_unsettled(entry: ViewEntry) -> bool:
    """Tell whether something is under way, by a process that lives or has died."""
    return bool(entry.staging)
