"""What a load would do, as a value that people and programs read."""

import enum
from pathlib import Path

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.left_out import LeftOut
from shmload._placement.placement import Placement
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
