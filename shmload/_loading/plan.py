"""What is to be done for each shard, decided from headers alone; no weight byte is read."""

import enum
import os
from pathlib import Path

import msgspec

from shmload._checkpoints.formats.known import detect_format
from shmload._checkpoints.identity import identify
from shmload._checkpoints.rules import RAW, Rule
from shmload._host.linux import SHM_DIR
from shmload._host.procfs import is_remote
from shmload._placement.placement import Placement
from shmload._segments.layout import Layout, lay_out, needs_conversion
from shmload._segments.metadata import make_metadata
from shmload._segments.names import segment_name


class Action(enum.Enum):
    """What happens to a shard."""

    ATTACH = "attach"
    """Its segment is resident."""
    DECODE = "decode"
    """Workers make its segment."""
    LINK = "link"
    """The library maps the file itself, whose format allows for that: it has the right dtypes and
    lies on a local disk."""


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's part of a plan."""

    component: str
    path: Path
    action: Action
    segment: str
    """The name its segment has or would have."""
    conversion: str
    """`raw`, or the dtype that its floats get; behind a slash a digest of the exceptions."""
    tensors: int
    read_nbytes: int
    """Size of the shard's tensors, in bytes."""
    segment_nbytes: int
    """Size of the segment, in bytes; 0 for a link."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `load_pipeline` or `warm` would do."""

    source: str
    shards: tuple[ShardPlan, ...]
    placement: Placement | None = None
    """The device of every module, where that was asked for."""

    @property
    def decode_nbytes(self) -> int:
        """Shared memory that is still to be taken, in bytes."""
        return sum(s.segment_nbytes for s in self.shards if s.action is Action.DECODE)

    @property
    def resident_nbytes(self) -> int:
        """Shared memory of segments that are there already, in bytes."""
        return sum(s.segment_nbytes for s in self.shards if s.action is Action.ATTACH)


class PlannedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's plan with what it takes to carry it out."""

    plan: ShardPlan
    source: os.stat_result
    """What fstat said of the shard before its header was read."""
    layout: Layout
    leaves_casts: bool
    """Whether the library surely casts some of its tensors itself."""


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
        path: where it was opened.
        fd: its descriptor.
        rule: the dtypes its tensors get.
        keep: whether its segment shall be resident afterwards.
        piece_nbytes: size of the pieces that it is decoded in, in bytes; None for the usual.

    Raises:
        CheckpointError: the header is wrong or the file is cut short.
    """
    found = os.fstat(fd)
    file_format = detect_format(fd, path)
    header = file_format.read_header(fd, path)
    identity = identify(path, found)
    # A file that has the wanted dtypes already makes the same segment under every rule.
    applied = rule if needs_conversion(header, rule) else RAW
    name = segment_name(identity, applied.text)
    metadata = make_metadata(identity.path, identity.key, applied.text)
    layout = lay_out(header, applied, metadata, piece_nbytes)
    if (SHM_DIR / name).exists():
        action = Action.ATTACH
    elif file_format.can_be_linked and applied == RAW and not keep and not is_remote(found.st_dev):
        action = Action.LINK
    else:
        action = Action.DECODE
    plan = ShardPlan(
        component=component,
        path=path,
        action=action,
        segment=name,
        conversion=applied.text,
        tensors=len(header.tensors),
        read_nbytes=layout.read_nbytes,
        segment_nbytes=0 if action is Action.LINK else layout.nbytes,
    )
    return PlannedShard(
        plan=plan,
        source=found,
        layout=layout,
        leaves_casts=any(map(rule.leaves_cast, header.tensors)),
    )
