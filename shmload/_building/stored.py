"""A built pipeline or model in a segment: its structure, and where the bytes of its tensors lie.

Bytes that other segments have stay there, and the object needs those segments; all others lie in
its own, with the structure. `keeping` writes it.

Guarantee: the tensors of what is restored are mapped copy-on-write, each with a lease on its
segment.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from shmload._building.code import Stamp, require_same
from shmload._building.homes import Homes, watch
from shmload._building.mapped import Spans, hold_leases, map_ranges
from shmload._building.parts import CannotKeepHere
from shmload._building.structure import Structure, put_together
from shmload._checkpoints.library import whole_libraries
from shmload._host.collector import paused_gc
from shmload._segments.listing import segments
from shmload._segments.segment import Segment, attach
from shmload.errors import PublicationError

STRUCTURE = "structure"
"""Name of the tensor that has the record."""


class Place(msgspec.Struct, frozen=True):
    """Where a region's bytes are."""

    segment: int
    """Index into `needs`; -1 for the object's own segment."""
    offset: int
    """Offset in the file in bytes; of an own one, the number that is its name."""
    nbytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What an object's segment has beside the bytes of tensors."""

    structure: Structure | None
    """None if nothing is kept."""
    regions: list[Place] = []
    code: dict[str, Stamp] = {}
    """What `code_of` says of its classes and functions; of a publication nothing."""


def storage_over(content: memoryview) -> torch.UntypedStorage:
    """Return memory as a storage, which keeps what owns it."""
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


class Opened:
    """A stored object whose segments are mapped.

    Args:
        source: what the object is called in errors.
        segments: its own, and those that it needs; they stay the caller's.
    """

    def __init__(self, source: str, segments: Sequence[Segment]) -> None:
        self.source = source
        self.segments = segments
        header = segments[0].read_header()
        begins = {spec.name: header.data_offset + spec.begin for spec in header.tensors}
        self._maps = [memoryview(map_ranges(each.fd, [(0, each.nbytes)])) for each in segments]
        nbytes = next(spec.nbytes for spec in header.tensors if spec.name == STRUCTURE)
        at = begins[STRUCTURE]
        try:
            record = msgspec.msgpack.decode(self._maps[0][at : at + nbytes], type=Record)
        except msgspec.DecodeError as exc:
            raise _broken(source, f"another shmload has made it: {exc}") from exc
        if record.structure is None:
            raise _broken(source, "nothing is kept of it")
        self.structure = record.structure
        self.code = record.code
        # The segment of each region, and where the region begins there.
        self._regions = [
            (place.segment + 1, place.offset if place.segment >= 0 else begins[str(place.offset)])
            for place in record.regions
        ]
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._sizes = [place.nbytes for place in record.regions]
        self._inodes = [segment.inode for segment in segments]

    @functools.cached_property
    def spans(self) -> Spans:
        """Where its segments are mapped in this process."""
        return Spans(set(self._inodes))

    def storage(self, region: int) -> torch.UntypedStorage:
        """Return the memory of a region; tensors of one region share it."""
        if region not in self._storages:
            number, begin = self._regions[region]
            content = self._maps[number][begin : begin + self._sizes[region]]
            self._storages[region] = storage_over(content)
        return self._storages[region]


@contextlib.contextmanager
def opened(source: str, own: Segment) -> Iterator[Opened]:
    """Attach and map what an object needs inside the block; what is made over it stays valid.

    Args:
        source: what the object is called in errors.
        own: its own segment, which is closed with the block.

    Raises:
        PublicationError: a segment that it needs is gone.
    """
    with contextlib.ExitStack() as closing:
        segments = [closing.enter_context(own)]
        own.touch()
        for name in own.read_metadata().needs:
            segment = attach(name)
            if segment is None:
                raise _broken(source, f"its segment {name} is gone")
            segment.touch()
            segments.append(closing.enter_context(segment))
        yield Opened(source, segments)


def restore(opened: Opened) -> Any:
    """Return the object of an open record.

    Raises:
        PublicationError: it cannot be restored; says why.
        CannotKeepHere: it cannot be restored in this process.
    """
    check = functools.partial(require_same, code=opened.code) if opened.code else None
    with whole_libraries(), paused_gc():
        try:
            thing = put_together(opened.structure, opened.storage, check)
        except (OSError, MemoryError, CannotKeepHere):
            raise
        except Exception as exc:  # whatever a class does when it is restored
            raise _broken(opened.source, f"{type(exc).__name__}: {exc}") from exc
    parts = [thing, *vars(thing).values()]
    hold_leases(parts, opened.segments, opened.spans)
    homes = Homes(opened.segments, opened.spans)
    for part in parts:
        if isinstance(part, torch.nn.Module):
            watch(part, homes)
    return thing


def modules_kept() -> set[str]:
    """Return the modules of the classes and functions that all kept objects are made of."""
    found: set[str] = set()
    for info in segments():
        if info.kept and (segment := attach(info.name)):
            with segment:
                found.update(_code_of(segment))
    return found


def _code_of(segment: Segment) -> dict[str, Stamp]:
    """Return what the record of a kept object says of its code; nothing if it has none."""
    header = segment.read_header()
    for spec in header.tensors:
        if spec.name == STRUCTURE:
            raw = os.pread(segment.fd, spec.nbytes, header.data_offset + spec.begin)
            with contextlib.suppress(msgspec.DecodeError):  # of another shmload
                return msgspec.msgpack.decode(raw, type=Record).code
    return {}


def _broken(source: str, reason: str) -> PublicationError:
    return PublicationError(
        f"{source} cannot be loaded: {reason}; publish it again, in an environment like this",
        reason=reason,
    )
