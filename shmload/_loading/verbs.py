"""Make checkpoints resident, say what that would take, and lend their path to any code."""

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.formats.known import format_names
from shmload._checkpoints.library import library
from shmload._checkpoints.wanted import Wanted
from shmload._host.collector import paused_gc
from shmload._host.linux import open_source
from shmload._loading.complete import complete_load
from shmload._loading.plan import Plan, plan_shard
from shmload._loading.progress import Callback
from shmload._loading.sources import find_with_rules, variants_hint
from shmload._placement.inventory import Inventory, choose_inventory
from shmload._placement.placement import place
from shmload._segments.segment import Stay
from shmload._segments.view import View
from shmload._service.client import Service
from shmload.errors import SourceNotFound


class WarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `warm` did."""

    source: str
    segments: tuple[str, ...]
    """Names of the segments that are resident now."""
    resident_nbytes: int
    """Their size together, in bytes."""
    read_nbytes: int
    """Bytes of weights that were read from the source; 0 if all was resident already."""
    elapsed_s: float
    """How long it took, in seconds."""


def warm(
    source: str | os.PathLike[str],
    *,
    torch_dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    pin: bool = False,
    service: Service | None = None,
    **hub_kwargs: Any,
) -> WarmReport:
    """Decode a source into segments that stay, for whoever loads it next with the same arguments.

    What is resident already is left as it is and no byte of it is read.

    Args:
        source: a pipeline's directory, one component's, a safetensors file, or a hub id.
        torch_dtype: as it will be given to `load_pipeline`: a dtype, its name, a dict by component,
            or None.
        components: only these.
        variant: as for `from_pretrained`, such as `fp16`.
        workers: worker processes; None for as many as the settings say.
        verify: recompute the digests, of segments that were resident before too.
        progress: as for `load_state_dict`.
        pin: have the service never evict the segments to make room.
        service: what decodes; None for the running service, if there is one.
        hub_kwargs: `revision`, `cache_dir`, `token`, `local_files_only`, `subfolder`.

    Raises:
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError, CapacityError, WorkerError,
        SegmentError: nothing of this call is left in shared memory then.
    """
    began = time.monotonic()
    wanted = Wanted.parse(source, torch_dtype, components, variant, hub_kwargs)
    found, rules = find_with_rules(wanted)
    if not found.checkpoints:
        raise SourceNotFound(source, f"it has no {format_names()} weights{variants_hint(found)}")
    with complete_load(
        found,
        rules,
        stay=Stay.RESIDENT,
        workers=workers,
        verify=verify,
        progress=progress,
        service=service,
    ) as load:
        held = load.holdings.segments()
        for segment in held if pin else ():
            segment.protect()
        return WarmReport(
            source=str(source),
            segments=tuple(segment.name for segment in held),
            resident_nbytes=sum(segment.nbytes for segment in held),
            read_nbytes=load.read_nbytes,
            elapsed_s=time.monotonic() - began,
        )


def plan(
    source: str | os.PathLike[str],
    *,
    torch_dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    keep: bool = False,
    device_map: object = None,
    max_memory: Mapping[Any, object] | None = None,
    inventory: str | Inventory | None = None,
    **hub_kwargs: Any,
) -> Plan:
    """Say what `load_pipeline` or, with `keep`, `warm` would do.

    Of the weights it reads headers only. A hub id that is not in the cache is downloaded first,
    unless `local_files_only` is given.

    With any of `device_map`, `max_memory` and `inventory` it also says on which device every module
    would be. That needs no such device, and imports the libraries (three seconds).

    Args:
        source: as for `warm`, like all arguments that are not named here.
        torch_dtype: as for `warm`.
        components: as for `warm`.
        variant: as for `warm`.
        keep: whether segments shall be resident afterwards.
        device_map: a strategy (`balanced`, `balanced_low_0`, `sequential`, `auto`), a device, or a
            dict of devices by component, pattern or dotted path; None for `auto`.
        max_memory: limits of weights by device, as for accelerate. Without an inventory there are
            no other accelerators.
        inventory: devices of another machine, such as `2x24GiB` or `cuda:0=24GiB,cpu=64GiB`; None
            for those that are here.
        hub_kwargs: as for `warm`.

    Raises:
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError.
        UnknownModule, DeviceMapMalformed: the device map cannot be followed.
        DoesNotFit: the devices are too small; the message says what would fit.
    """
    wanted = Wanted.parse(source, torch_dtype, components, variant, hub_kwargs)
    found, rules = find_with_rules(wanted)
    shards = []
    for checkpoint in found.checkpoints:
        for path in checkpoint.shards:
            fd = open_source(path)
            try:
                component = checkpoint.component
                shards.append(plan_shard(component, path, fd, rules[component], keep=keep).plan)
            finally:
                os.close(fd)
    placement = None
    if (device_map, max_memory, inventory) != (None, None, None):
        with paused_gc():
            described = library().describe_components(found, wanted.dtype, components)
        devices = choose_inventory(inventory, max_memory)
        placement = place(described, "auto" if device_map is None else device_map, devices)
    return Plan(source=str(source), shards=tuple(shards), placement=placement)


@contextlib.contextmanager
def view(
    source: str | os.PathLike[str],
    *,
    torch_dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    keep: bool = False,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **hub_kwargs: Any,
) -> Iterator[Path]:
    """Lend a path that looks like the source and whose weights are in shared memory, decoded.

    For any code that takes a path: `load_lora_weights`, `from_single_file`, peft, transformers.

    Args:
        source: as for `warm`, like all arguments that are not named here.
        torch_dtype: as for `warm`. All floats of a single file, or of a directory without a known
            class, get it.
        components: as for `warm`.
        variant: as for `warm`.
        keep: leave the segments resident; else they go with the last tensor over them.
        workers: as for `warm`.
        verify: as for `warm`.
        progress: as for `warm`.
        hub_kwargs: as for `warm`.

    Yields:
        A directory, or a file if the source is one. It is there inside the `with` block only;
        tensors that were mapped through it stay valid.

    Raises:
        As `warm`.
    """
    wanted = Wanted.parse(source, torch_dtype, components, variant, hub_kwargs)
    found, rules = find_with_rules(wanted)
    with (
        complete_load(
            found,
            rules,
            stay=Stay.RESIDENT if keep else Stay.PRIVATE,
            workers=workers,
            verify=verify,
            progress=progress,
        ) as load,
        View(found.root, load.holdings.files()) as lent,
    ):
        yield lent.path
