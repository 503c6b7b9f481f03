"""A built pipeline or model in a segment: its structure, and where the bytes of its tensors lie.

Bytes that other segments have stay there, and the object needs those segments; all others lie in
its own, with the structure. `keeping` writes it.

Guarantee: the tensors of what is restored are mapped copy-on-write, each with a lease on its
segment.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shmload._building.code import Stamp, require_same
from shmload._building.homes import Homes, watch
from shmload._building.mapped import hold_leases, map_ranges
from shmload._building.parts import CannotKeepHere
from shmload._building.structure import Structure, put_together
from shmload._checkpoints.header import Header
from shmload._checkpoints.library import whole_libraries
from shmload._host.collector import paused_gc
from shmload._host.limits import allow_descriptors
from shmload._host.procfs import mappings_of
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


def restore(source: str, own: Segment) -> tuple[Any, int]:
    """Return a kept object, and the size of the segments that it lies in, in bytes.

    Args:
        source: what the object is called in errors.
        own: its own segment, which is closed.

    Raises:
        PublicationError: it cannot be restored; says why.
        CannotKeepHere: it cannot be restored in this process.
    """
    with contextlib.ExitStack() as closing:
        segments = [closing.enter_context(own)]
        own.touch()
        needs = own.read_metadata().needs
        allow_descriptors(2 * (len(needs) + 1))  # a segment's, and its lease's
        for name in needs:
            segment = attach(name)
            if segment is None:
                raise _broken(source, f"its segment {name} is gone")
            segment.touch()
            segments.append(closing.enter_context(segment))
        return _put_together(source, segments), sum(each.nbytes for each in segments)


def _put_together(source: str, segments: Sequence[Segment]) -> Any:
    """Return the object that some segments have, the first of which is its own."""
    own = segments[0]
    header = own.read_header()
    try:
        record = _record_of(own, header)
    except msgspec.DecodeError as exc:
        raise _broken(source, f"another shmload has made it: {exc}") from exc
    if record.structure is None:
        raise _broken(source, "nothing is kept of it")
    begins = {spec.name: header.data_offset + spec.begin for spec in header.tensors}
    maps = [memoryview(map_ranges(each.fd, [(0, each.nbytes)])) for each in segments]

    @functools.cache  # tensors of one region share its memory
    def storage_of(region: int) -> torch.UntypedStorage:
        place = record.regions[region]
        begin = place.offset if place.segment >= 0 else begins[str(place.offset)]
        return storage_over(maps[place.segment + 1][begin : begin + place.nbytes])

    check = functools.partial(require_same, code=record.code) if record.code else None
    with whole_libraries(), paused_gc():
        try:
            thing = put_together(record.structure, storage_of, check)
        except (OSError, MemoryError, CannotKeepHere):
            raise
        except Exception as exc:  # whatever a class does when it is restored
            raise _broken(source, f"{type(exc).__name__}: {exc}") from exc
    parts = [thing, *vars(thing).values()]
    mappings = mappings_of({each.inode for each in segments})
    hold_leases(parts, segments, mappings)
    homes = Homes(segments, mappings)
    for part in parts:
        if isinstance(part, torch.nn.Module):
            watch(part, homes)
    return thing


def modules_kept() -> set[str]:
    """Return the modules of the classes and functions that all kept objects are made of."""
    found: set[str] = set()
    for info in segments():
        if info.kept and (segment := attach(info.name)):
            with segment, contextlib.suppress(msgspec.DecodeError):  # of another shmload
                found.update(_record_of(segment, segment.read_header()).code)
    return found


def _record_of(own: Segment, header: Header) -> Record:
    """Return the record of a kept object.

    Args:
        own: the object's segment.
        header: of that segment.

    Raises:
        msgspec.DecodeError: another shmload has made it.
    """
    spec = next(spec for spec in header.tensors if spec.name == STRUCTURE)
    raw = os.pread(own.fd, spec.nbytes, header.data_offset + spec.begin)
    return msgspec.msgpack.decode(raw, type=Record)


def _broken(source: str, reason: str) -> PublicationError:
    return PublicationError(
        f"{source} cannot be loaded: {reason}; publish it again, in an environment like this",
        reason=reason,
    )
