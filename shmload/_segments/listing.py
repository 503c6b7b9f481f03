"""Listing segments, and the processes that use them: with a lease, or by a mapping without one.

The names in /dev/shm are the only registry; each segment's header says what it holds.

A program that opened a segment by a path, through a view, has no lease once the view is gone. Its
mapping keeps the memory: to remove the name would only hide that.
"""

import itertools
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from shmload._checkpoints.wanted import is_publication
from shmload._host.descriptors import Inode, inode_of, try_lock
from shmload._host.procfs import command_of, lock_holders, mappers
from shmload._host.shm import shm_stat
from shmload._segments.metadata import BUILT_SUFFIX, Metadata, read_metadata
from shmload._segments.names import identify, part_names, short_id
from shmload._segments.segment import Segment, open_segments
from shmload._tables import Listing, Page, Table
from shmload._wording import count_of, format_nbytes, format_time
from shmload.errors import SegmentCorrupt


class SegmentInfo(Metadata, frozen=True, kw_only=True, omit_defaults=False):
    """A segment as its header, its lock and its mode describe it.

    `conversion` is `corrupt` if the header cannot be read.
    """

    name: str
    nbytes: int
    """Size of the segment, in bytes."""
    done_nbytes: int = 0
    """How much of it is filled, in bytes."""
    is_leased: bool
    """Whether some process is attached, or maps it without being attached."""
    is_current: bool
    """Whether the shard on disk is still the one that was decoded."""
    used_at: float
    """When it was last decoded, attached, given back or unpinned, in seconds since the epoch."""
    is_pinned: bool
    """Whether it is pinned: it is never evicted to make room."""
    is_shared: bool = False
    """Whether it is removed with its last lease."""
    needed_by: tuple[str, ...] = ()
    """What needs it, and is evicted before it: publications, as `shm:NAME@1`, and built objects, by
    the ids of their segments."""

    @property
    def needs_as(self) -> str:
        """How `needed_by` of what it needs calls it: by its source if it is a publication."""
        return self.source if is_publication(self.source) else short_id(self.name)

    @property
    def is_due(self) -> bool:
        """Whether its last use is as long ago as it is to stay."""
        return 0 < self.keep_for_s <= time.time() - self.used_at


class Segments(Listing[SegmentInfo]):
    """The resident segments, as a list that is printed as a table."""

    def page(self) -> Page:
        """Return a row for each segment, and the totals."""
        rows = [
            (
                info.model or "-",
                short_id(info.name),
                format_nbytes(info.nbytes),
                info.dtype or info.conversion,
                _state(info),
                (info.source.removeprefix(f"{info.root}/") if info.root else info.source)
                + ("" if info.is_current else " (changed since)"),
            )
            for info in self
        ]
        titles = ("MODEL", "SEGMENT", "SIZE", "DTYPE", "STATE", "FILE")
        return Page((Table(titles=titles, rows=rows, right=(2,)), amount_of(self)))


def amount_of(found: Sequence[SegmentInfo]) -> str:
    """Write the number of segments and their total size."""
    nbytes = format_nbytes(sum(info.nbytes for info in found))
    return f"{count_of(len(found), 'segment')}, {nbytes}"


def segments() -> Segments:
    """List this user's resident segments, oldest first.

    A segment that is evicted during the listing is left out. Printed, and in a notebook, the list
    is the table of `shmload ls --long`. If a segment has no lease, this reads which segments this
    user's processes have mapped, which takes 0.1 to 1 ms for each process.
    """
    found = segments_by_lock()
    used = users_of(info.name for info in found if not info.is_leased)
    return Segments(
        msgspec.structs.replace(info, is_leased=True) if info.name in used else info
        for info in found
    )


def segments_by_lock() -> list[SegmentInfo]:
    """List the segments, oldest first; a segment is in use only if it has a lease."""
    found = []
    for segment in open_segments():
        # Hold no lock here: a process releasing the last lease would mistake it for another.
        info = _describe(segment)
        if segment.has_name:
            found.append(info)
    needing: dict[str, list[str]] = {}
    for info in found:
        for name in info.needs:
            needing.setdefault(name, []).append(info.needs_as)
    current = {info.name for info in found if info.is_current}
    return [
        msgspec.structs.replace(
            info,
            needed_by=tuple(needing.get(info.name, ())),
            # What a load has built is as current as what it needs.
            is_current=info.is_current and (not info.kept or current.issuperset(info.needs)),
        )
        for info in sorted(found, key=lambda info: (info.created_at, info.name))
    ]


def parts_under_way() -> list[SegmentInfo]:
    """List what is being decoded by processes of this user, and has its header already."""
    found = [_describe(part) for part in open_segments(part_names())]
    return [info for info in found if info.is_leased and info.source]


def names_by_inode() -> dict[Inode, str]:
    """Return the names of this user's segments by their files."""
    return {segment.inode: segment.name for segment in open_segments()}


def needing_by_segment() -> dict[str, dict[str, bool]]:
    """Return the segments that need a segment, by its name, each with whether a load built it."""
    found: dict[str, dict[str, bool]] = {}
    for segment in open_segments():
        if metadata := read_metadata(segment.fd):
            for name in metadata.needs:
                found.setdefault(name, {})[segment.name] = bool(metadata.kept)
    return found


def _describe(segment: Segment) -> SegmentInfo:
    try:
        metadata = segment.read_metadata()
    except SegmentCorrupt:
        metadata = Metadata(conversion="corrupt")
    identity = metadata.identity.removesuffix(BUILT_SUFFIX)
    found = os.fstat(segment.fd)
    return SegmentInfo(
        **msgspec.structs.asdict(metadata),
        name=segment.name,
        nbytes=found.st_size,
        done_nbytes=min(found.st_size, 512 * found.st_blocks),  # stat(2): units of 512 bytes
        is_current=_is_of(metadata.source, identity),
        used_at=found.st_mtime,
        is_pinned=segment.is_pinned,
        is_shared=segment.is_shared,
        # Last: a load waits for this lock, and the source may be on a slow disk.
        is_leased=not try_lock(segment.fd, exclusive=True),
    )


def _is_of(path: str, identity: str) -> bool:
    """Tell whether a file still is the one with an identity; a publication always is."""
    if is_publication(path):
        return True
    try:
        return identify(path, os.stat(path)) == identity
    except (OSError, ValueError):
        return False


def _state(info: SegmentInfo) -> str:
    """Write what keeps a segment from being evicted, or `idle`."""
    is_limited = bool(info.keep_for_s) and not info.is_pinned
    states = (
        ("in use", info.is_leased),
        ("idle", not info.is_leased and not info.is_pinned),
        ("pinned", info.is_pinned),
        (f"needed by {', '.join(info.needed_by)}", bool(info.needed_by)),
        (f"kept for {format_time(info.keep_for_s)}", is_limited),
        (f"keeps what was built: {info.kept}", bool(info.kept)),
    )
    return ", ".join(word for word, is_so in states if is_so)


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a model."""

    pid: int
    command: str
    """Its command line; empty if the kernel hides it."""
    program: str
    """The program in it without its directory: a script or module rather than `python`."""


def describe_users(known: Mapping[str, Collection[int]]) -> dict[str, tuple[User, ...]]:
    """Describe the processes that `users_of` or `holders` has found, by segment."""
    users = {pid: describe_user(pid, command_of(pid)) for pid in set().union(*known.values())}
    return {name: tuple(users[pid] for pid in sorted(pids)) for name, pids in known.items()}


def describe_user(pid: int, command: Sequence[str]) -> User:
    """Describe a process by the words of its command line."""
    program = command[0].rpartition("/")[2] if command else ""
    if program.startswith("python"):
        # The module or script that Python runs, not one of its options.
        rest = list(itertools.dropwhile(lambda word: re.fullmatch("-[^cm].*", word), command[1:]))
        if rest and rest[0] == "-m":
            rest = rest[1:]
        if rest and not rest[0].startswith("-"):
            program = rest[0].rpartition("/")[2]
        # A program in a copy of a template has the template's command line.
        if rest[:1] == ["-c"] and "shmload._templates.template" in "".join(rest[1:2]):
            program = "shmload run"
    return User(pid=pid, command=" ".join(command), program=program)


def name_users(users: Collection[User]) -> str:
    """Write the first user for a table, and how many more there are; empty for none."""
    if not users:
        return ""
    first = min(users, key=lambda user: user.pid)
    more = f" +{len(users) - 1}" if len(users) > 1 else ""
    return str(first.pid) + (f" {first.program}" if first.program else "") + more


def holders(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the ids of the processes that have leases on segments, by segment.

    Reads one file; the result lacks processes in another pid namespace and processes that
    inherited a lease.
    """
    locks = lock_holders()
    return {name: locks[inode] for name, inode in _inodes(names).items() if inode in locks}


def users_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the ids of the processes that have leases on segments or map them, by segment.

    Reads the mappings of all processes of this user: 0.1 ms for each, 1 ms with torch in it. The
    result lacks processes in another pid namespace.
    """
    inodes = _inodes(names)
    locks, maps = lock_holders(), mappers(inodes.values())
    found = {n: locks.get(inode, set()) | maps.get(inode, set()) for n, inode in inodes.items()}
    return {name: pids for name, pids in found.items() if pids}


def _inodes(names: Iterable[str]) -> dict[str, Inode]:
    """Return the inodes of the segments that exist."""
    return {name: inode_of(found) for name in names if (found := shm_stat(name))}
