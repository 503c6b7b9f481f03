"""`load_pipeline`: a diffusion pipeline whose weights lie in shared memory.

Guarantee: what it returns equals what `from_pretrained` gives with the same arguments, or it
raises.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shmload._checkpoints.hub import find_source
from shmload._checkpoints.resolve import Checkpoint, Source, components_with_weights
from shmload._checkpoints.rules import RAW, Rule, likely_rule, rule_for
from shmload._checkpoints.wanted import Wanted
from shmload._decoding.ring import Ring
from shmload._host.collector import freeze_imports, paused_gc
from shmload._loading.load import Load
from shmload._loading.progress import Callback, Progress
from shmload._placement.device_map import STRATEGIES
from shmload._placement.inventory import choose_inventory
from shmload._placement.placement import place
from shmload._segments.segment import Stay
from shmload._settings import local_world_size
from shmload.errors import ArgumentError, MemoryLimitExceeded, SharedMemoryFull, SourceNotFound
from shmload.integrations._devices.destination import (
    BytesNeeded,
    Destination,
    Pin,
    parse_max_host_memory,
)
from shmload.integrations.ranks import linger

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)

Rules = dict[str, Rule]
"""The rule of each component's checkpoint."""
ChooseRule = Callable[[Checkpoint, object], Rule]
Begin = Callable[..., contextlib.AbstractContextManager[tuple[Load, Rules]]]
"""`_begin` with what does not depend on where the weights go."""

# With these the library reads other files, or makes new tensors of what it reads.
_BYPASSING_KWARGS = ("use_flashpack", "use_onnx", "quantization_config")
_NO_ROOM = (MemoryLimitExceeded, SharedMemoryFull)


def load_pipeline(
    source: str | os.PathLike[str],
    *,
    torch_dtype: object = None,
    device_map: object = None,
    max_memory: Mapping[Any, object] | None = None,
    max_host_memory: float | str | None = None,
    pin: Pin = "auto",
    components: Collection[str] | None = None,
    keep: bool = False,
    share: bool | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **from_pretrained_kwargs: Any,
) -> "DiffusionPipeline":
    """Load a diffusion pipeline through shared memory.

    May be called from several threads: decoding is parallel, building is not, because the libraries
    are not made for it.

    Args:
        source: what `DiffusionPipeline.from_pretrained` takes: a directory, or a hub id.
        torch_dtype: a `torch.dtype`, its name, a dict of these by component (with a `default`), or
            None, which means what it means there: float32 for diffusers' models, the checkpoint's
            own dtype for those of transformers.
        device_map: where its models go. None leaves them on the CPU. A device for all of them; a
            strategy, `balanced`, `balanced_low_0`, `sequential`, or `auto`, which also divides
            models and lets weights wait on the CPU or in `offload_folder`; or a dict of devices by
            component, pattern or dotted path, with `cpu`, `offload`, `disk` and `meta` too.
        max_memory: what weights may take of each device, in bytes or as `20GiB`, by device.
        max_host_memory: how much memory of the host weights may take on their way to accelerators,
            in bytes or as `512MiB`; each of them must go to one.
        pin: how accelerators are fed. `ring`: by a ring of pinned memory; `register`: segments are
            pinned themselves; `off`: without pinned memory; `auto`: which of the first two was the
            quicker when this machine was first asked.
        components: of those with weights, only these; the others are None. Those without weights,
            tokenizers and the like, are there in any case.
        keep: leave the segments resident for the next process. Else they belong to this pipeline
            alone and go with its last tensor; segments that are resident already stay. Without it
            weights that all go to accelerators are not put into segments, but pass through a ring.
        share: let other processes attach the segments for as long as some process has them. None
            means so for one of several ranks on this host, and at least until the others have come;
            but not with `max_host_memory`, nor where only a load that shares nothing has room.
        workers: worker processes; None for as many as there are cores to spare.
        verify: recompute the segments' digests, resident ones too.
        progress: a callback of bytes done and bytes in all, True or False for a bar, None for a bar
            on a terminal.
        from_pretrained_kwargs: everything else that `from_pretrained` takes, components included;
            the weights of components passed in are not decoded.

    Returns:
        The pipeline, of its own class, on the CPU unless `device_map` says otherwise. Its
        parameters there are mapped from the segments copy-on-write: writing to one is private to
        this process. On other devices they are its own, aligned to 256 bytes.

    Raises:
        ShmloadError: the source, its files, the room for it, or a worker is at fault.
        Exception: whatever `from_pretrained` raises, with the source's own paths in it.
    """
    kwargs = from_pretrained_kwargs
    is_rank = share is None and not keep and max_host_memory is None and local_world_size() > 1
    wanted = Wanted.parse(
        source,
        torch_dtype,
        components,
        kwargs.get("variant"),
        kwargs,
        is_pipeline=True,
        has_others=True,
    )
    # What this asks for, large reads instead of page faults, is what the workers do.
    kwargs.pop("disable_mmap", None)
    found = find_source(wanted, kwargs)
    if not found.is_pipeline:
        raise SourceNotFound(
            source, "not a pipeline (no model_index.json); use load_state_dict or view for it"
        )
    if components is not None:
        others = components_with_weights(found).difference(components, kwargs)
        kwargs.update(dict.fromkeys(others))
    is_bypassed = kwargs.get("use_safetensors") is False or any(map(kwargs.get, _BYPASSING_KWARGS))
    destination = _destination(device_map, max_memory, max_host_memory, pin, kwargs)
    stay = Stay.RESIDENT if keep else Stay.SHARED if share else Stay.PRIVATE
    may_stream = stay is Stay.PRIVATE and not (verify or is_bypassed)
    if max_host_memory is not None:
        destination = _bound(destination if may_stream else None, found, wanted.dtype)
    if destination:
        destination.require_known(found, kwargs)
    choose = functools.partial(_choose_rules, found, wanted.dtype, is_bypassed=is_bypassed)
    with paused_gc(), Progress(progress, found.root.name) as counter:
        begin = functools.partial(_begin, found, choose, workers=workers, progress=counter)
        build = functools.partial(_build, found, destination, wanted.dtype, kwargs, verify=verify)
        if is_rank:
            # For the ring that one process alone would use no room is needed.
            with contextlib.suppress(*(_NO_ROOM if may_stream and destination else ())):
                return _load_by_segments(begin, build, Stay.SHARED)
            logger.warning("%s: no room to share it in; each rank reads it by itself", source)
        return _load_alone(found, destination, begin, build, stay, may_stream=may_stream)


def _load_alone(
    source: Source,
    destination: Destination | None,
    begin: Begin,
    build: Callable[..., "DiffusionPipeline"],
    stay: Stay,
    *,
    may_stream: bool,
) -> "DiffusionPipeline":
    """Load by a ring where that is possible, else by segments."""
    ring = destination.open_ring(source) if destination and may_stream else None
    if destination and ring:
        with (
            ring,
            contextlib.suppress(BytesNeeded),
            begin(stay=stay, ring=ring) as (load, rules),
        ):
            return build(load, rules, ring)
        destination.require_no_limit(source)
        logger.info("%s: weights are wanted on the host first", source.given)
    return _load_by_segments(begin, build, stay)


def _load_by_segments(
    begin: Begin, build: Callable[..., "DiffusionPipeline"], stay: Stay
) -> "DiffusionPipeline":
    """Load by segments; what is shared stays until every rank on this host has come for it."""
    with begin(stay=stay) as (load, rules):
        pipe = build(load, rules)
        if stay is Stay.SHARED and local_world_size() > 1:
            linger(load.segments())
    return pipe


def _destination(
    device_map: object,
    max_memory: Mapping[Any, object] | None,
    max_host_memory: float | str | None,
    pin: Pin,
    kwargs: dict[str, Any],
) -> Destination | None:
    """Return where the weights go; None if they stay, or if the library brings them there."""
    if device_map is None:
        if max_memory is not None:
            raise ArgumentError("max_memory is for a device_map, such as 'auto'; give both")
        return None
    if kwargs.get("quantization_config") is not None:
        kwargs["device_map"] = device_map  # weights are quantised on the device that they go to
        if max_memory is not None:
            kwargs["max_memory"] = max_memory
        return None
    return Destination(
        device_map=device_map,
        max_memory=max_memory,
        max_host_nbytes=parse_max_host_memory(max_host_memory),
        pin=pin,
        offload_folder=kwargs.pop("offload_folder", None),
    )


def _bound(destination: Destination | None, source: Source, torch_dtype: object) -> Destination:
    """Make sure that the host can be kept from holding weights; a strategy decides at once.

    Raises:
        ArgumentError: something else that was asked for keeps them there.
        DoesNotFit: as `place`.
    """
    if destination is None:
        raise ArgumentError(
            "max_host_memory is for loads that keep nothing on the host: give a device_map, and "
            "neither keep, share, verify, quantization_config nor other files than safetensors"
        )
    if destination.device_map not in STRATEGIES:
        return destination
    from shmload.integrations._build.module_trees import components_of

    inventory = choose_inventory(None, destination.max_memory)
    placement = place(components_of(source, torch_dtype), destination.device_map, inventory)
    # The default is for models without a checkpoint, such as those that are passed in.
    first = next(iter(placement.execution_devices.values()))
    decided = {"": first} | placement.device_map
    return msgspec.structs.replace(destination, device_map=decided)


def _build(
    source: Source,
    destination: Destination | None,
    torch_dtype: object,
    kwargs: dict[str, Any],
    load: Load,
    rules: Rules,
    ring: Ring | None = None,
    *,
    verify: bool,
) -> "DiffusionPipeline":
    """Build the pipeline and put it where it belongs."""
    # Not at the top: torch takes a second, in which workers decode.
    from shmload.integrations._build.build import Build
    from shmload.integrations.placing import place_pipeline

    place = None
    if destination:
        place = functools.partial(place_pipeline, destination=destination, load=load, ring=ring)
    return Build(source, rules, load, torch_dtype, kwargs, place).run(verify=verify)


def _choose_rules(
    source: Source, torch_dtype: object, choose: ChooseRule, *, is_bypassed: bool
) -> Rules:
    """Return the rule of each component's checkpoint."""
    return {
        checkpoint.component: RAW if is_bypassed else choose(checkpoint, torch_dtype)
        for checkpoint in source.checkpoints
    }


@contextlib.contextmanager
def _begin(
    source: Source,
    choose: Callable[[ChooseRule], Rules],
    ring: Ring | None = None,
    **load_kwargs: Any,
) -> Iterator[tuple[Load, Rules]]:
    """Begin to decode by the likely rules, and import the classes meanwhile.

    Where those say otherwise what was decoded is discarded, and decoding begins anew.
    """
    is_cold = "diffusers" not in sys.modules
    rules = choose(likely_rule)
    load_kwargs["ring"] = ring
    with contextlib.ExitStack() as loads:
        load = loads.enter_context(Load(source, rules, parent_is_busy=is_cold, **load_kwargs))
        _import_classes(source)  # most of a cold process's time
        if is_cold:
            freeze_imports()
        certain = choose(rule_for)
        if certain != rules:
            load.discard()
            if ring:
                ring.reset()
            load = loads.enter_context(Load(source, certain, parent_is_busy=False, **load_kwargs))
        yield load, certain


def _import_classes(source: Source) -> None:
    """Import what the pipeline is made of, and what builds it."""
    import diffusers
    import transformers

    import shmload.integrations._build.build  # noqa: F401 with it, torch

    # What its module warns of when it is imported is not about these models.
    getattr(diffusers, source.class_name or "DiffusionPipeline", None)
    libraries = {"diffusers": diffusers, "transformers": transformers}
    for checkpoint in source.checkpoints:
        if checkpoint.library in libraries:
            getattr(libraries[checkpoint.library], checkpoint.class_name, None)
