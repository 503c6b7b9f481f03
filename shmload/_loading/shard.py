"""Shards that are open for a load: each one's file, and what its header alone tells to do with it.

No weights are read here. A plan is a value that people and programs read.
"""

import contextlib
import enum
import functools
import os
from pathlib import Path

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.formats.known import detect_format
from shmload._checkpoints.identity import Stat, identify
from shmload._checkpoints.quantised import are_quantised, require_dequantised
from shmload._checkpoints.remote import pointed_object
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.source import Checkpoint, LeftOut, Source
from shmload._decoding.job import Job
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload._host.procfs import is_remote
from shmload._host.shm import shm_nbytes
from shmload._placement.placement import Placement
from shmload._segments.layout import Layout, lay_out, needs_conversion
from shmload._segments.metadata import Place, make_metadata
from shmload._segments.names import segment_name
from shmload._segments.part import Part
from shmload._tables import Page, Printable, Table
from shmload._wording import format_nbytes, printing


class Action(enum.Enum):
    """What happens to a shard."""

    ATTACH = "attach"
    """Its segment is resident."""
    DECODE = "decode"
    """Workers make its segment."""
    LINK = "link"
    """The library maps the file directly: its format allows that, it has the wanted dtypes and lies
    on a local disk."""


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's part of a plan."""

    component: str
    path: Path
    action: Action
    segment: str
    """Name of its segment, whether or not the segment exists."""
    conversion: str
    """`raw`, or the dtype that its floats get; exceptions add a slash and their digest."""
    tensors: int
    read_nbytes: int
    """Size of the shard's tensors, in bytes."""
    segment_nbytes: int
    """Size of the segment, in bytes; 0 for a link."""


class OpenShard(Descriptor):
    """One shard's open file and what is planned for it; owns the descriptor.

    Args:
        component: its name in the pipeline, or empty.
        path: of the shard.
        rule: the dtypes its tensors get.
        keep: its segment will be resident, so it is decoded even if the library could map the file.
        place: where its segment belongs.
        piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

    Raises:
        CheckpointError: it cannot be opened, its header is wrong, or nothing dequantises it.
        LibraryError: the package that dequantises is not installed.
    """

    def __init__(
        self,
        component: str,
        path: Path,
        rule: Rule,
        *,
        keep: bool,
        place: Place | None = None,
        piece_nbytes: int | None = None,
    ) -> None:
        super().__init__(open_source(path))
        self._piece_nbytes = piece_nbytes
        try:
            self._plan(component, path, rule, keep, place or Place())
        except BaseException:
            self.close()
            raise

    def _plan(self, component: str, path: Path, rule: Rule, keep: bool, place: Place) -> None:
        self.source = os.fstat(self.fd)
        """The result of fstat before the header was read."""
        file_format = detect_format(self.fd, path)
        self.header = header = file_format.read_header(self.fd, path)
        identity = identify(path, self.source)
        # If the file has the wanted dtypes, every rule makes the same segment: give it one name.
        is_cast = needs_conversion(header, rule) and not are_quantised([header])
        self._applied = applied = rule if is_cast else RAW
        self._metadata = make_metadata(identity.path, identity.key, applied.text, place)
        self.leaves_casts = any(rule.leaves_cast(tensor, applied) for tensor in header.tensors)
        """Whether the library certainly casts some of its tensors."""
        name = segment_name(identity, applied.text)
        action, nbytes = Action.ATTACH, shm_nbytes(name) or 0
        if not nbytes:
            may_link = file_format.can_be_linked and applied == RAW and not keep
            if may_link and not is_remote(self.source.st_dev):
                action = Action.LINK
            else:
                require_dequantised(path, header.tensors, applied)
                action, nbytes = Action.DECODE, self.layout.nbytes
        self.plan = ShardPlan(
            component=component,
            path=path,
            action=action,
            segment=name,
            conversion=applied.text,
            tensors=len(header.tensors),
            read_nbytes=header.data_nbytes,
            segment_nbytes=nbytes,
        )

    @functools.cached_property
    def layout(self) -> Layout:
        """What its segment has; a load that attaches it needs no layout."""
        return lay_out(self.header, self._applied, self._metadata, self._piece_nbytes)

    def job(self, part: Part) -> Job:
        """Return the job that decodes it into a part; both descriptors stay with their owners."""
        pointed = pointed_object(self.fd)
        return Job(
            path=pointed.url if pointed else self.plan.path,
            source_fd=self.fd,
            source=Stat.of(self.source),
            part_fd=part.fd,
            nbytes=self.layout.nbytes,
            pieces=self.layout.pieces,
        )


def open_checkpoint(
    source: Source,
    checkpoint: Checkpoint,
    rule: Rule,
    *,
    keep: bool,
    piece_nbytes: int | None = None,
) -> list[OpenShard]:
    """Open and plan all shards of a checkpoint; the caller closes them.

    If only all headers together say that the weights are quantised, none is cast.

    Args:
        source: what it is a part of.
        checkpoint: the checkpoint.
        rule: the dtypes its tensors get.
        keep: make its segments resident.
        piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

    Raises:
        CheckpointError: a shard cannot be opened, or its header is wrong.
    """
    place = Place.of(source, checkpoint.component)
    with contextlib.ExitStack() as opened:
        shards = [
            opened.enter_context(
                OpenShard(
                    checkpoint.component,
                    path,
                    rule,
                    keep=keep,
                    place=place,
                    piece_nbytes=piece_nbytes,
                )
            )
            for path in checkpoint.shards
        ]
        is_cast = any(shard.plan.conversion != RAW.text for shard in shards)
        if is_cast and len(shards) > 1 and are_quantised([shard.header for shard in shards]):
            return open_checkpoint(source, checkpoint, RAW, keep=keep, piece_nbytes=piece_nbytes)
        opened.pop_all()
        return shards


class Plan(Printable, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `load_pipeline` or `warm` would do; printed, the tables of `shmload plan`."""

    source: str
    shards: tuple[ShardPlan, ...]
    placement: Placement | None = None
    """The device of every module; None unless devices were asked for."""
    left_out: tuple[LeftOut, ...] = ()
    """Files of weights that are left to the libraries, because shmload does not read them."""

    @property
    def decode_nbytes(self) -> int:
        """Size of the segments to make, in bytes."""
        return sum(s.segment_nbytes for s in self.shards if s.action is Action.DECODE)

    @property
    def resident_nbytes(self) -> int:
        """Size of the segments that are resident, in bytes."""
        return sum(s.segment_nbytes for s in self.shards if s.action is Action.ATTACH)

    def page(self) -> Page:
        """Return a row for each shard and the sums; or the placement, if devices were asked for."""
        if self.placement:
            return self.placement.page()
        rows = [
            (
                shard.component or "-",
                shard.path.name,
                shard.action.value,
                _dtype_in_words(shard.conversion),
                str(shard.tensors),
                format_nbytes(shard.read_nbytes),
                format_nbytes(shard.segment_nbytes),
            )
            for shard in self.shards
        ]
        titles = ("COMPONENT", "SHARD", "ACTION", "DTYPE", "TENSORS", "FILE", "SEGMENT")
        sums = (
            f"shared memory: {format_nbytes(self.decode_nbytes)} to be taken, "
            f"{format_nbytes(self.resident_nbytes)} resident"
        )
        left = (printing(f"left to the library: {each}") for each in self.left_out)
        return Page((Table(titles=titles, rows=rows, right=(4, 5, 6)), *left, sums))


def _dtype_in_words(conversion: str) -> str:
    """Write a shard's conversion for a table."""
    target, _, exceptions = conversion.partition("/")
    name = TORCH_NAMES.get(target, "as stored")
    return f"{name} in part" if exceptions else name
