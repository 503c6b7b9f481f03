"""`publish`: a finished pipeline or model under a name of its own, for all of a user's processes.

A tensor whose bytes are those of a segment stays there, and the publication needs that segment. All
others are copied once, into the publication's own segment, with the structure.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
import torch

from shmload._building.mapped import Spans, map_ranges
from shmload._building.published import STRUCTURE, Place, Record, load_published, storage_over
from shmload._building.structure import CannotKeep, Region, put_together, take_apart
from shmload._building.weights import models_in
from shmload._building.writing import content_of, fill, plan
from shmload._checkpoints.rule import RAW
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES
from shmload._host.pagemap import has_own_pages
from shmload._loading.room import made_room, own_budget
from shmload._segments.listing import names_by_inode
from shmload._segments.metadata import make_metadata
from shmload._segments.part import Part
from shmload._segments.publications import Publication
from shmload._segments.removal import attached, give_back
from shmload._segments.segment import Segment, attach
from shmload._wording import format_nbytes, logger_of
from shmload.errors import ArgumentError, NotPublishable

logger = logger_of(__name__)

# Their names lie in the header's text, whose length is limited.
_MOST_NEEDED = 400


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a publication."""

    name: str
    version: int
    """1 for the first under the name."""
    nbytes: int
    """Size of what was copied: the tensors that lie in no other segment, and the structure."""
    shared_nbytes: int
    """Size of the tensors that stay in the segments that they were loaded to."""
    needs: tuple[str, ...]
    """Names of these segments."""

    @property
    def source(self) -> str:
        """What `load_pipeline`, `load_model` and the command line take: `shm:NAME@VERSION`."""
        return Publication(self.name, self.version).source

    def newest(self) -> str:
        """Return the source of the newest version of the name.

        Raises:
            SegmentNotFound: none is there any more.
        """
        return Publication(self.name).newest().source

    def load(self) -> Any:
        """Load this version, as `load_pipeline(self.source)` does."""
        return load_published(self.source)


def publish(thing: Any, name: str) -> Published:
    """Give a pipeline or a model, as it is now, a name in shared memory.

    `load_pipeline("shm:NAME")` and `load_model(cls, "shm:NAME")` then return one like it, in any
    process of this user, by attaching. Later changes to `thing` do not change it. The version is
    pinned: it stays until `shmload rm shm:NAME@VERSION` or a reboot. Earlier versions of the name
    lose their pins, and go when room is needed and no process uses them.

    Args:
        thing: a pipeline of diffusers, or a model. It is pickled without its weights: LoRA, fused
            or loaded, quantised weights, schedulers and tokenizers are kept as they are. Weights on
            devices are copied to the host. Of a compiled model, the original is published.
        name: up to 100 letters, digits, `.`, `_` and `-`; `shm:` may stand before it.

    Returns:
        The version, with how much was copied.

    Raises:
        NotPublishable: a part of it cannot be kept, such as the hooks of an offloading call.
        ArgumentError: the name is none, or has a version.
        CapacityError: there is no room for what has to be copied.
    """
    asked = Publication.parse(name)
    if asked.version is not None:
        raise ArgumentError(f"{name!r}: publish gives the version; leave it out")
    made = publish_version(thing, asked, is_pinned=True)
    *earlier, _ = asked.versions().values() or [""]
    for name in earlier:
        with attached(name) as segment:
            if segment:
                segment.unpin()
    return made


def publish_version(thing: Any, asked: Publication, *, is_pinned: bool) -> Published:
    """Publish a pipeline or a model, and leave the earlier versions as they are.

    Args:
        thing: as for `publish`.
        asked: the name.
        is_pinned: whether it is never evicted.

    Raises:
        NotPublishable, CapacityError: as `publish`.
    """
    if not isinstance(thing, torch.nn.Module) and not hasattr(thing, "components"):
        raise ArgumentError(f"a {type(thing).__name__} is neither a pipeline nor a model")
    try:
        apart = take_apart(thing)
        storages = [storage_over(_memory(each)) for each in apart.regions]
        # What cannot be restored here would be restored nowhere.
        put_together(apart.structure, storages.__getitem__)
    except Exception as exc:  # whatever a class does when it is restored
        reason = str(exc) if isinstance(exc, CannotKeep) else f"{type(exc).__name__}: {exc}"
        raise NotPublishable(asked.source, reason, _remedy(thing, reason)) from exc
    with _Lenders() as lenders:
        own, places = _place(apart.regions, lenders)
        needs = lenders.keep()
        if len(needs) > _MOST_NEEDED:
            raise NotPublishable(asked.source, f"it needs {len(needs)} segments")
        record = msgspec.msgpack.encode(Record(structure=apart.structure, regions=places))
        number, part = asked.begin()
        with part:
            source = Publication(asked.name, number).source
            nbytes = _write(part, source, record, own, needs, is_pinned=is_pinned)
    shared = sum(place.nbytes for place in places if place.segment >= 0)
    logger.info("published %s: %s copied", source, format_nbytes(nbytes))
    return Published(
        name=asked.name,
        version=number,
        nbytes=nbytes,
        shared_nbytes=shared,
        needs=needs,
    )


def _remedy(thing: Any, reason: str) -> str:
    """Return what takes away the hooks that are the reason; empty if it is another one."""
    if "add_hook_to_module" in reason:  # accelerate's, as the error of pickle calls them
        return "call `pipe.remove_all_hooks()`"
    if "HookRegistry" in reason:  # diffusers'
        for name, model in models_in(thing).items():
            if getattr(model, "is_cache_enabled", False):
                return f"call `pipe.{name}.disable_cache()`" if name else "call `disable_cache()`"
    return ""


class _Lenders:
    """The segments that have tensors of a publication.

    Inside the block it has leases on those that `find` returned: no process removes them before
    the publication is there.
    """

    def __init__(self) -> None:
        self._names = names_by_inode()
        self.spans = Spans(set(self._names))
        self._segments: dict[Inode, Segment | None] = {}
        self._needed: dict[Inode, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for segment in filter(None, self._segments.values()):
            give_back(segment)

    def find(self, inode: Inode) -> Segment | None:
        """Return a segment; None if it has gone."""
        if inode not in self._segments:
            self._segments[inode] = attach(self._names[inode])
        return self._segments[inode]

    def need(self, inode: Inode) -> int:
        """Note that a segment is needed; return its number among those."""
        return self._needed.setdefault(inode, len(self._needed))

    def keep(self) -> tuple[str, ...]:
        """Make those that are needed resident, and return their names.

        A shared one would go with its last user.
        """
        needed = [segment for inode in self._needed if (segment := self._segments[inode])]
        for segment in needed:
            segment.keep()
        return tuple(segment.name for segment in needed)


def _place(regions: Sequence[Region], lenders: _Lenders) -> tuple[list[Region], list[Place]]:
    """Return the regions that no segment has, and the place of each region."""
    own: list[Region] = []
    places = []
    for region in regions:
        mapping = lenders.spans.find_address(region.address)
        if mapping and region.address + region.nbytes <= mapping.end:
            segment = lenders.find(mapping.inode)
            offset = mapping.offset + region.address - mapping.start
            if segment and _is_unchanged(region, segment, offset):
                places.append(Place(lenders.need(mapping.inode), offset, region.nbytes))
                continue
        places.append(Place(-1, len(own), region.nbytes))
        own.append(region)
    return own, places


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


def _write(
    part: Part,
    source: str,
    record: bytes,
    own: Sequence[Region],
    needs: tuple[str, ...],
    *,
    is_pinned: bool,
) -> int:
    """Write a version and give it its name; return its size in bytes."""
    contents = {
        str(number): content_of(_memory(region), region.dtype) for number, region in enumerate(own)
    }
    contents[STRUCTURE] = content_of(memoryview(record), torch.uint8)
    layout = plan(contents, make_metadata(source, "", RAW.text, needs))
    with made_room(layout.nbytes, own_budget(), is_charged_here=True, is_cancelled=bool):
        part.prepare(layout)
    fill(part, contents, is_pinned=is_pinned).close()
    return layout.nbytes
