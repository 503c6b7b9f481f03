"""Listing segments.

The names in /dev/shm are the only registry; each segment's header says what it holds.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Sequence

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.header import Header
from shmload._checkpoints.identity import identify
from shmload._host.linux import SHM_DIR, inode_of, is_named, shm_open, try_lock
from shmload._host.procfs import lock_holders
from shmload._segments.metadata import Metadata, parse_metadata
from shmload._segments.names import segment_names, short_id
from shmload._segments.segment import Segment, is_protected, is_shared
from shmload._tables import Listing, Page, Table
from shmload._wording import count_of, format_age, format_nbytes
from shmload.errors import SegmentCorrupt, SegmentError


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
    """When it was last decoded, attached or given back, in seconds since the epoch."""
    is_pinned: bool
    """Whether it is pinned: it is never evicted to make room."""
    is_shared: bool = False
    """Whether it is removed with its last lease."""
    dtype: str = ""
    """torch's name of the dtype that its floats got; if it is `raw`, of most of its bytes."""
    identity: str = ""
    """The shard's `Identity.key` when it was decoded; the same for copies of one file."""
    keep_for_s: int = 0
    """How long it stays while no process uses it, in seconds; 0 if nothing limits that."""


class Segments(Listing[SegmentInfo]):
    """The resident segments, as a list that is printed as a table."""

    def page(self) -> Page:
        """Return a row for each segment, and the totals."""
        rows = [
            (
                short_id(info.name),
                format_nbytes(info.nbytes),
                info.dtype or info.conversion,
                _state(info),
                format_age(time.time() - info.used_at),
                info.source if info.is_current else f"{info.source} (changed since)",
            )
            for info in self
        ]
        titles = ("SEGMENT", "SIZE", "DTYPE", "STATE", "LAST USED", "SOURCE")
        return Page((Table(titles=titles, rows=rows, right=(1,)), amount_of(self)))


def amount_of(found: Sequence[SegmentInfo]) -> str:
    """Write the number of segments and their total size."""
    nbytes = format_nbytes(sum(info.nbytes for info in found))
    return f"{count_of(len(found), 'segment')}, {nbytes}"


def segments() -> Segments:
    """List this user's resident segments, oldest first.

    A segment that is evicted during the listing is left out. Printed, and in a notebook, the list
    is the table of `shmload ls --long`.
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
    return Segments(sorted(found, key=lambda info: (info.created_at, info.name)))


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


def _describe(segment: Segment) -> SegmentInfo:
    dtype = ""
    try:
        header = segment.read_header()
        metadata = parse_metadata(header.metadata)
        dtype = main_dtype(header, metadata.conversion)
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
        dtype=dtype,
        identity=metadata.identity,
        keep_for_s=metadata.keep_for_s,
    )


def main_dtype(header: Header, conversion: str) -> str:
    """Return torch's name of the dtype that a segment's floats got, or of most of its bytes.

    Args:
        header: of the segment.
        conversion: as in its metadata.
    """
    target = conversion.partition("/")[0]
    if target not in TORCH_NAMES:  # raw: the tensors are as the file has them
        nbytes: dict[str, int] = {}
        for tensor in header.tensors:
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
        target = max(nbytes, key=lambda dtype: nbytes[dtype], default="")
    return TORCH_NAMES.get(target, target)


def _state(info: SegmentInfo) -> str:
    """Write what keeps a segment from being evicted, or `idle`."""
    is_limited = bool(info.keep_for_s) and not info.is_pinned
    states = (
        ("in use", info.is_leased),
        ("idle", not info.is_leased and not info.is_pinned),
        ("pinned", info.is_pinned),
        (f"kept for {format_age(info.keep_for_s)}", is_limited),
    )
    return ", ".join(word for word, is_so in states if is_so)
