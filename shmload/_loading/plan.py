"""Decides what to do with each shard from its header alone; reads no weights."""

import enum
import functools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.formats.known import detect_format
from shmload._checkpoints.header import Header
from shmload._checkpoints.identity import identify
from shmload._checkpoints.left_out import LeftOut
from shmload._checkpoints.quantised import are_quantised, require_dequantised
from shmload._checkpoints.rule import RAW, Rule
from shmload._host.procfs import is_remote
from shmload._host.shm import shm_nbytes
from shmload._placement.placement import Placement
from shmload._segments.layout import Layout, lay_out, needs_conversion
from shmload._segments.metadata import make_metadata
from shmload._segments.names import segment_name
from shmload._tables import Page, Printable, Table
from shmload._wording import format_nbytes


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
        rows += [
            (
                each.component or "-",
                each.path.name,
                "library",
                each.kind,
                "-",
                format_nbytes(each.nbytes),
                "-",
            )
            for each in self.left_out
        ]
        titles = ("COMPONENT", "SHARD", "ACTION", "DTYPE", "TENSORS", "FILE", "SEGMENT")
        sums = (
            f"shared memory: {format_nbytes(self.decode_nbytes)} to be taken, "
            f"{format_nbytes(self.resident_nbytes)} resident"
        )
        return Page((Table(titles=titles, rows=rows, right=(4, 5, 6)), sums))


def _dtype_in_words(conversion: str) -> str:
    """Write a shard's conversion for a table."""
    target, _, exceptions = conversion.partition("/")
    name = TORCH_NAMES.get(target, "as stored")
    return f"{name} in part" if exceptions else name


class PlannedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's plan, and what a load needs to carry it out."""

    plan: ShardPlan
    source: os.stat_result
    """The result of fstat before the header was read."""
    lay_out: Callable[[], Layout]
    """Plans its segment; a load that attaches it needs no layout."""
    leaves_casts: bool
    """Whether the library certainly casts some of its tensors."""
    header: Header


def plan_shard(
    component: str,
    path: Path,
    fd: int,
    rule: Rule,
    *,
    keep: bool,
    piece_nbytes: int | None = None,
) -> PlannedShard:
    """Decide what to do with one open shard.

    Args:
        component: its name in the pipeline, or empty.
        path: the path it was opened by.
        fd: its descriptor, which stays the caller's.
        rule: the dtypes its tensors get.
        keep: make its segment resident.
        piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

    Raises:
        CheckpointError: the header is wrong, the file is cut short, or nothing dequantises it.
        LibraryMissing: the package that dequantises is not installed.
    """
    found = os.fstat(fd)
    file_format = detect_format(fd, path)
    header = file_format.read_header(fd, path)
    identity = identify(path, found)
    # If the file has the wanted dtypes, every rule makes the same segment: give it one name.
    is_cast = needs_conversion(header, rule) and not are_quantised([header])
    applied = rule if is_cast else RAW
    may_link = (
        file_format.can_be_linked and applied == RAW and not keep and not is_remote(found.st_dev)
    )
    name = segment_name(identity, applied.text)
    metadata = make_metadata(identity.path, identity.key, applied.text)
    make_layout = functools.cache(partial(lay_out, header, applied, metadata, piece_nbytes))
    resident_nbytes = shm_nbytes(name) or None
    if resident_nbytes is not None:
        action, nbytes = Action.ATTACH, resident_nbytes
    elif may_link:
        action, nbytes = Action.LINK, 0
    else:
        require_dequantised(path, header.tensors, applied)
        action, nbytes = Action.DECODE, make_layout().nbytes
    plan = ShardPlan(
        component=component,
        path=path,
        action=action,
        segment=name,
        conversion=applied.text,
        tensors=len(header.tensors),
        read_nbytes=header.data_nbytes,
        segment_nbytes=nbytes,
    )
    return PlannedShard(
        plan=plan,
        source=found,
        lay_out=make_layout,
        leaves_casts=any(rule.leaves_cast(tensor, applied) for tensor in header.tensors),
        header=header,
    )
