"""What was published, loaded in this process: its structure over its segments.

Guarantee: its tensors are mapped copy-on-write, each with a lease on its segment.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from shmload._building.homecoming import watch
from shmload._building.homes import Home, Homes
from shmload._building.mapped import Spans, hold_leases, map_ranges
from shmload._building.structure import Structure, put_together
from shmload._checkpoints.library import whole_libraries
from shmload._host.collector import paused_gc
from shmload._segments.publications import Publication
from shmload._segments.segment import Segment, attach
from shmload.errors import ArgumentError, PublicationBroken

STRUCTURE = "structure"
"""Name of the tensor that has the record."""


class Place(msgspec.Struct, frozen=True):
    """Where a region's bytes are."""

    segment: int
    """Index into `needs`; -1 for the publication's own segment."""
    offset: int
    """Offset in the file in bytes; of an own one, the number that is its name."""
    nbytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a publication's segment has beside the bytes of tensors."""

    structure: Structure
    regions: list[Place]


def storage_over(content: memoryview) -> torch.UntypedStorage:
    """Return memory as a storage, which keeps what owns it."""
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


class Opened:
    """A version whose segments are mapped.

    Args:
        source: of the version.
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
        except msgspec.ValidationError as exc:
            raise PublicationBroken(source, f"another shmload has made it: {exc}") from exc
        self.structure = record.structure
        # Of each region: its segment, and where it begins there.
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

    def home(self, number: int, like: torch.Tensor) -> Home | None:
        """Return where a tensor of the structure lies; None if it has no bytes.

        Args:
            number: its index.
            like: has its dtype and shape.
        """
        region, offset = self.structure.places[number]
        if region < 0:
            return None
        segment, begin = self._regions[region]
        return Home(self._inodes[segment], begin + offset, like.dtype, like.shape)

    def tensor(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the structure.

        Args:
            number: its index.
            like: has its dtype, shape and strides.
        """
        region, offset = self.structure.places[number]
        if region < 0:
            return torch.empty_like(like, device="cpu")
        made = torch.empty(0, dtype=like.dtype, device="cpu")
        start = offset // like.itemsize
        return made.set_(self.storage(region), start, like.shape, like.stride())


@contextlib.contextmanager
def opened(source: str) -> Iterator[Opened]:
    """Attach and map a version inside the block; what is made over it stays valid.

    Args:
        source: `shm:NAME`, for the newest version, or `shm:NAME@VERSION`.

    Raises:
        SegmentNotFound: there is no such publication.
        PublicationBroken: a segment that it needs is gone.
    """
    version, own = Publication.parse(source).attach()
    with contextlib.ExitStack() as closing:
        segments = [closing.enter_context(own)]
        own.touch()
        for name in own.read_metadata().needs:
            segment = attach(name)
            if segment is None:
                raise PublicationBroken(version.source, f"its segment {name} is gone")
            segment.touch()
            segments.append(closing.enter_context(segment))
        yield Opened(version.source, segments)


def load_published(source: str, given: Mapping[str, object] | None = None) -> Any:
    """Return the pipeline or model of a publication.

    Args:
        source: as for `opened`.
        given: the other arguments of the call; each must be None or False.

    Raises:
        SegmentNotFound: there is no such publication.
        PublicationBroken: it cannot be loaded here; says why.
        ArgumentError: an argument that a publication does not take.
    """
    asked = given or {}
    if others := sorted(
        name for name, value in asked.items() if value is not None and value is not False
    ):
        raise ArgumentError(
            f"{source} is loaded as it was published: leave out {', '.join(others)}"
        )
    with opened(source) as version:
        with whole_libraries(), paused_gc():
            try:
                thing = put_together(version.structure, version.storage)
            except (OSError, MemoryError):
                raise
            except Exception as exc:  # whatever a class does when it is restored
                raise PublicationBroken(version.source, f"{type(exc).__name__}: {exc}") from exc
        parts = [thing, *vars(thing).values()]
        hold_leases(parts, version.segments, version.spans)
        homes = Homes(version.segments, version.spans)
        for part in parts:
            if isinstance(part, torch.nn.Module):
                watch(part, homes)
    return thing
