"""`plan`: what a load would do, as a value that people and programs read."""

import enum
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.library import library
from shmload._checkpoints.rule import settle_dtype
from shmload._checkpoints.source import LeftOut, find_left_out
from shmload._checkpoints.wanted import Wanted, require_bools
from shmload._decoding.shard import Shard, open_checkpoint
from shmload._host.collector import paused_gc
from shmload._loading.progress import Progress
from shmload._loading.sources import find_with_rules
from shmload._placement.inventory import Inventory, choose_inventory
from shmload._placement.placement import Placement, place
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


def plan(
    source: str | os.PathLike[str],
    *,
    pipeline_class: type | str | None = None,
    dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    keep: bool = False,
    device_map: object = None,
    max_memory: Mapping[Any, object] | None = None,
    inventory: str | Inventory | None = None,
    **hub_kwargs: Any,
) -> Plan:
    """Say what `load_pipeline` would do, or with `keep` what `warm` would do.

    It reads the headers of the shards and no weights. A hub id that is not in the cache is
    downloaded first, unless `local_files_only` is True.

    With `device_map`, `max_memory` or `inventory` the plan also names the device of every module.
    The devices need not exist here. This imports the libraries, which takes three seconds.

    Args:
        source: as for `warm`.
        pipeline_class: as for `warm`.
        dtype: as for `warm`.
        components: as for `warm`.
        variant: as for `warm`.
        keep: plan resident segments.
        device_map: a strategy (`balanced`, `balanced_low_0`, `sequential`, `auto`), a device, or a
            dict of devices by component, pattern or dotted path; None for `auto`.
        max_memory: the most that weights may take of each device, as for accelerate. Without an
            inventory, the accelerators named here are the only ones.
        inventory: the devices of another machine, such as `2x24GiB` or `cuda:0=24GiB,cpu=64GiB`;
            None for the devices of this machine.
        hub_kwargs: as for `warm`.

    Raises:
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError.
        ArgumentError: the device map does not fit the pipeline.
        DoesNotFit: the devices are too small; the message says what would fit.
    """
    require_bools(keep=keep)
    wanted = Wanted.parse(source, dtype, components, variant, hub_kwargs, function=plan)
    with Progress(None, wanted.title) as progress:
        found, rules = find_with_rules(wanted, progress, pipeline_class=pipeline_class)
    shards = []
    with paused_gc():
        for checkpoint in found.checkpoints:
            rule = rules[checkpoint.component]
            for shard in open_checkpoint(found, checkpoint, rule, may_link=not keep):
                with shard:
                    shards.append(_plan_of(shard))
    placement = None
    if (device_map, max_memory, inventory) != (None, None, None):
        with paused_gc():
            dtype = settle_dtype(wanted.dtype, found)
            described = library("module_trees").components_of(found, dtype)
        devices = choose_inventory(inventory, max_memory)
        placement = place(described, "auto" if device_map is None else device_map, devices)
    return Plan(
        source=str(source),
        shards=tuple(shards),
        placement=placement,
        left_out=find_left_out(found),
    )


def _plan_of(shard: Shard) -> ShardPlan:
    action, nbytes = Action.ATTACH, shard.resident_nbytes
    if shard.is_linked:
        action = Action.LINK
    elif not nbytes:
        action, nbytes = Action.DECODE, shard.layout.nbytes
    return ShardPlan(
        component=shard.component,
        path=shard.path,
        action=action,
        segment=shard.name,
        conversion=shard.rule.text,
        tensors=len(shard.header.tensors),
        read_nbytes=shard.header.data_nbytes,
        segment_nbytes=nbytes,
    )


def _dtype_in_words(conversion: str) -> str:
    """Write a shard's conversion for a table."""
    target, _, exceptions = conversion.partition("/")
    name = TORCH_NAMES.get(target, "as stored")
    return f"{name} in part" if exceptions else name
