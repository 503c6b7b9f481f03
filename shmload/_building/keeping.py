"""Keeps a built pipeline or model in a segment, as `stored` has it.

A tensor whose bytes are those of a segment stays there. All others are copied once, into the
object's own segment, with the structure.
"""

import ctypes
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from shmload._building.code import code_of
from shmload._building.mapped import map_ranges
from shmload._building.parts import CannotKeep, Region
from shmload._building.stored import STRUCTURE, Place, Record, storage_over
from shmload._building.structure import put_together, take_apart
from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.header import Header, TensorSpec
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES, has_own_pages
from shmload._host.procfs import mappings_of
from shmload._host.shm import write_at
from shmload._loading.room import chosen_budget, made_room
from shmload._segments.layout import lay_out
from shmload._segments.listing import names_by_inode
from shmload._segments.metadata import Metadata
from shmload._segments.part import Part
from shmload._segments.removal import give_back
from shmload._segments.segment import Segment, Stay, attach
from shmload._segments.upkeep import digest_data

_DTYPES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
# At a time: a part that is written grows steadily, and `shmload ls` shows how far it is.
_BLOCK_NBYTES = 64 << 20
# The names of the needed ones lie in the header's text, whose length is limited.
_MOST_NEEDED = 400
# An object that uses a smaller share of a segment copies that share. Else a few norms of a
# quantised model would keep its base.
_LEAST_USE = 0.1


class Stored(NamedTuple):
    """What was written."""

    segment: Segment
    """The object's own, which is the caller's."""
    copied_nbytes: int
    """Size of the tensors that lie in no other segment."""
    shared_nbytes: int
    """Size of the tensors that stay in the segments that they were loaded to."""
    needs: tuple[str, ...]
    """Names of these segments."""


def store(
    part: Part,
    thing: Any,
    metadata: Metadata,
    *,
    is_pinned: bool = False,
    checks_code: bool = False,
    waits: bool = False,
) -> Stored:
    """Write an object into its own segment, which gets its name.

    Args:
        part: of the segment; stays the caller's.
        thing: a pipeline, a model, or a namespace of models.
        metadata: what the segment's header is to say, but for `needs`.
        is_pinned: whether it is never evicted.
        checks_code: whether it is restored only where its classes have the code of today.
        waits: as for `made_room`.

    Raises:
        CannotKeep: a part of it cannot be kept.
        CapacityError: there is no room for what has to be copied.
        Exception: whatever a class raises when it is restored.
    """
    apart = take_apart(thing)
    code = code_of(apart.code) if checks_code else {}
    # What cannot be restored here would be restored nowhere.
    storages = [storage_over(_memory(each)) for each in apart.regions]
    put_together(apart.structure, storages.__getitem__)
    with _Lenders() as lenders:
        own, places = _place(apart.regions, lenders)
        if lenders.count > _MOST_NEEDED:
            raise CannotKeep(f"it needs {lenders.count} segments")
        needs = lenders.keep()
        record = Record(structure=apart.structure, regions=places, code=code)
        metadata = msgspec.structs.replace(metadata, needs=needs, dtype=lenders.dtype())
        segment = _write(part, record, metadata, own, is_pinned=is_pinned, waits=waits)
    copied = sum(place.nbytes for place in places if place.segment < 0)
    shared = sum(place.nbytes for place in places if place.segment >= 0)
    return Stored(segment, copied, shared, needs)


def _write(
    part: Part,
    record: Record,
    metadata: Metadata,
    own: Sequence[Region] = (),
    *,
    is_pinned: bool = False,
    waits: bool = False,
) -> Segment:
    """Write a record and the bytes of regions, and give the part its name; return the segment."""
    contents = {str(number): (_dtype_of(each), _memory(each)) for number, each in enumerate(own)}
    contents[STRUCTURE] = ("U8", memoryview(msgspec.msgpack.encode(record)))
    specs = list[TensorSpec]()
    for name, (dtype, content) in contents.items():
        begin = specs[-1].end if specs else 0
        shape = (content.nbytes * 8 // NBITS[dtype],)
        specs.append(TensorSpec(name, dtype, shape, begin, begin + content.nbytes))
    header = Header(tensors=tuple(specs), metadata=None, data_offset=0)
    layout = lay_out(header, lambda spec: spec.dtype, metadata)
    with made_room(layout.nbytes, chosen_budget(), is_cancelled=bool, waits=waits):
        part.prepare(layout)
    written = Segment(part.name, part.fd).read_header()
    for spec in written.tensors:
        _, content = contents[spec.name]
        for begin in range(0, spec.nbytes, _BLOCK_NBYTES):
            at = written.data_offset + spec.begin + begin
            write_at(part.fd, content[begin : begin + _BLOCK_NBYTES], at)
    return part.publish(digest_data(part.fd, written), Stay.RESIDENT, is_pinned=is_pinned)


def _dtype_of(region: Region) -> str:
    """Return the dtype of whole elements as a segment names it, or else that of bytes."""
    is_whole = region.nbytes % region.dtype.itemsize == 0
    return _DTYPES.get(str(region.dtype).removeprefix("torch."), "U8") if is_whole else "U8"


def keep_nothing(part: Part, metadata: Metadata) -> None:
    """Write a segment that says only that an object cannot be kept."""
    _write(part, Record(structure=None), metadata).close()


def why_not_kept(error: Exception) -> str:
    """Return the reason that an error of `store` gives."""
    return str(error) if isinstance(error, CannotKeep) else f"{type(error).__name__}: {error}"


class _Lenders:
    """The segments that have tensors of an object.

    Inside the block it holds leases on the segments that `find` returned, so no process removes
    them before the object is kept.
    """

    def __init__(self) -> None:
        self._names = names_by_inode()
        self.mappings = mappings_of(self._names.keys())
        self._segments: dict[Inode, Segment | None] = {}
        self._needed: dict[Inode, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        give_back(*filter(None, self._segments.values()))

    def find(self, inode: Inode) -> Segment | None:
        """Return a segment; None if it has gone."""
        if inode not in self._segments:
            found = attach(self._names[inode])
            if found and found.inode != inode:  # removed, and decoded again
                found.close()
                found = None
            self._segments[inode] = found
        return self._segments[inode]

    def need(self, inode: Inode) -> int:
        """Note that a segment is needed; return its number among those."""
        return self._needed.setdefault(inode, len(self._needed))

    @property
    def count(self) -> int:
        """How many are needed."""
        return len(self._needed)

    def keep(self) -> tuple[str, ...]:
        """Make the segments that the object needs resident, and return their names.

        A shared segment would be removed with its last user.
        """
        needed = [segment for inode in self._needed if (segment := self._segments[inode])]
        for segment in needed:
            segment.keep()
        return tuple(segment.name for segment in needed)

    def dtype(self) -> str:
        """Return the dtype of the largest of those that are needed; empty if none is."""
        needed = [segment for inode in self._needed if (segment := self._segments[inode])]
        largest = max(needed, key=lambda segment: segment.nbytes, default=None)
        return largest.read_metadata().dtype if largest else ""


def _place(regions: Sequence[Region], lenders: _Lenders) -> tuple[list[Region], list[Place]]:
    """Return the regions that no segment has, and the place of each region."""
    lent: list[tuple[Segment, int] | None] = []
    used: Counter[Inode] = Counter()
    for region in regions:
        found = _find(region, lenders)
        lent.append(found)
        if found:
            used[found[0].inode] += region.nbytes
    own: list[Region] = []
    places = []
    for region, found in zip(regions, lent, strict=True):
        if found and used[found[0].inode] >= _LEAST_USE * found[0].nbytes:
            segment, offset = found
            places.append(Place(lenders.need(segment.inode), offset, region.nbytes))
        else:
            places.append(Place(-1, len(own), region.nbytes))
            own.append(region)
    return own, places


def _find(region: Region, lenders: _Lenders) -> tuple[Segment, int] | None:
    """Return the segment that has a region's bytes, and where; None if none has them."""
    mapping = lenders.mappings.at(region.address)
    if not mapping or region.address + region.nbytes > mapping.end:
        return None
    segment = lenders.find(mapping.inode)
    offset = mapping.offset + region.address - mapping.start
    return (segment, offset) if segment and _is_unchanged(region, segment, offset) else None


def _is_unchanged(region: Region, segment: Segment, offset: int) -> bool:
    """Tell whether memory that is mapped from a segment still has the segment's bytes."""
    begin = region.address // PAGE_NBYTES * PAGE_NBYTES
    end = -(-(region.address + region.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
    if not has_own_pages(begin, end):
        return True
    # Another tensor in its first or last page may have been changed, or a value set as it was.
    start = offset // PAGE_NBYTES * PAGE_NBYTES
    mapped = map_ranges(segment.fd, [(start, offset + region.nbytes - start)])
    stored = np.frombuffer(mapped, np.uint8, region.nbytes, offset - start)
    return np.array_equal(stored, np.frombuffer(_memory(region), np.uint8))


def _memory(region: Region) -> memoryview:
    return memoryview((ctypes.c_uint8 * region.nbytes).from_address(region.address)).cast("B")
