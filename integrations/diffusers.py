"""`load_pipeline`: a diffusion pipeline whose weights lie in shared memory.

Guarantee: what it returns equals what `from_pretrained` gives with the same arguments, or it
raises.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shmload._checkpoints.hub import find_source
from shmload._checkpoints.own_dtypes import settle_dtype
from shmload._checkpoints.resolve import Source, components_with_weights
from shmload._checkpoints.wanted import Wanted
from shmload._decoding.ring import Ring
from shmload._host.collector import paused_gc
from shmload._loading.load import Load
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import Rules
from shmload._loading.steps import Step
from shmload._segments.segment import Stay
from shmload._settings import local_world_size
from shmload.errors import MemoryLimitExceeded, SharedMemoryFull, SourceNotFound
from shmload.integrations._building.early import begin_early
from shmload.integrations._building.keywords import require_taken
from shmload.integrations._building.route import Route, choose_route, parse_destination
from shmload.integrations._devices.hollow import BytesNeeded
from shmload.integrations._devices.ways import Pin
from shmload.integrations.ranks import linger

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)


def load_pipeline(
    source: str | os.PathLike[str],
    *,
    dtype: object = None,
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

    Several threads may call it. They decode in parallel and build one after the other, because the
    libraries' own loading is not thread-safe.

    Args:
        source: a directory or a hub id, as for `DiffusionPipeline.from_pretrained`.
        dtype: a `torch.dtype`, its name, `auto`, or a dict of these by component (with a
            `default`). None means the same as for `from_pretrained`: float32 for models of
            diffusers, the checkpoint's own dtype for models of transformers. `auto` means the
            checkpoint's own dtype for all. A name or `auto` counts, unlike in diffusers, which
            loads float32 for a text.
        device_map: where the models go. None leaves them on the CPU. It may be one device; a
            strategy (`balanced`, `balanced_low_0`, `sequential`, `auto`); or a dict of devices by
            component, pattern or dotted path, in which `cpu`, `offload`, `disk` and `meta` are
            devices too. `auto` also divides models, and offloads weights to the CPU or to
            `offload_folder` if the accelerators are too small.
        max_memory: the most that weights may take of each device, in bytes or as `20GiB`.
        max_host_memory: the most host memory that weights may take on their way to accelerators,
            in bytes or as `512MiB`. All weights must go to accelerators.
        pin: how bytes are copied to accelerators. `ring` copies through a ring of pinned memory;
            `register` pins the segments; `off` pins nothing. `auto` takes `ring` or `register`,
            whichever was faster when shmload measured this machine.
        components: load only these of the components with weights; the others are None. Components
            without weights, such as tokenizers, are always loaded.
        keep: leave the segments resident for the next process. False: new segments belong to this
            pipeline and go with its last tensor; segments that were resident stay, and so do those
            that a running service decodes; weights that all go to accelerators pass through a ring
            instead of segments.
        share: let other processes attach the segments as long as any process has them. None means
            True for one of several ranks on this host, and keeps the segments at least until all
            ranks have attached them; it means False with `max_host_memory`, or when there is room
            for a ring but not for shared segments.
        workers: number of worker processes; None for as many as there are spare cores.
        verify: recompute the digests of all segments, resident ones too.
        progress: a function that gets bytes done and bytes in all; True or False for a bar or
            none; None for a bar on a terminal.
        from_pretrained_kwargs: all other arguments of `from_pretrained`. Components may be passed;
            their weights are not decoded.

    Returns:
        The pipeline, of the class that the source names. On the CPU its parameters are mapped from
        the segments copy-on-write: a write is private to this process. On other devices they have
        memory of their own, aligned to 256 bytes.

    Raises:
        ShmloadError: the source, its files, a worker, or the room for the weights is at fault.
        Exception: any error of `from_pretrained`, with the source's paths instead of the view's.
    """
    kwargs = from_pretrained_kwargs
    variant = kwargs.get("variant")
    wanted = Wanted.parse(
        source,
        dtype,
        components,
        variant,
        kwargs,
        function=load_pipeline,
        is_pipeline=True,
        has_others=True,
    )
    # It asks for large reads instead of page faults. The workers read so in any case.
    kwargs.pop("disable_mmap", None)
    found, left_out = _find_pipeline(wanted, kwargs)
    require_taken(kwargs, found, load_pipeline)
    dtype = settle_dtype(wanted.dtype, found)
    destination = parse_destination(device_map, max_memory, max_host_memory, pin, kwargs)
    route = choose_route(
        found,
        dtype,
        destination,
        kwargs,
        keep=keep,
        share=share,
        verify=verify,
        is_bounded=max_host_memory is not None,
    )
    with paused_gc(), Progress(progress, wanted.title) as counter:
        attempt = _Attempt(
            source=found,
            dtype=dtype,
            route=route,
            kwargs=kwargs,
            left_out=left_out,
            workers=workers,
            verify=verify,
            progress=counter,
        )
        pipe = attempt.run()
    logger.info("%s: loaded: %s", counter.title, counter.steps.describe())
    return pipe


def _find_pipeline(wanted: Wanted, kwargs: dict[str, Any]) -> tuple[Source, frozenset[str]]:
    """Find a pipeline; return it with the components with weights that are not wanted.

    These become None in `kwargs`.
    """
    found = find_source(wanted, kwargs)
    if not found.is_pipeline:
        raise SourceNotFound(
            wanted.source,
            "not a pipeline (no model_index.json); use load_state_dict or view for it",
        )
    if wanted.components is None:
        return found, frozenset()
    others = components_with_weights(found).difference(wanted.components, kwargs)
    kwargs.update(dict.fromkeys(others))
    return found, frozenset(others)


class _Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `load_pipeline`; each public method is one way to decode and build."""

    source: Source
    dtype: object
    route: Route
    kwargs: dict[str, Any]
    """For `from_pretrained`."""
    left_out: frozenset[str]
    """Components that `kwargs` has as None because others were chosen."""
    workers: int | None
    verify: bool
    progress: Progress

    def run(self) -> "DiffusionPipeline":
        """Load in the first way that the route allows and that works."""
        if self.route.tries_to_share and (pipe := self.by_shared_segments()) is not None:
            return pipe
        if (ring := self.route.open_ring(self.source)) and (pipe := self.by_ring(ring)) is not None:
            return pipe
        return self.by_segments(self.route.stay)

    def by_segments(self, stay: Stay) -> "DiffusionPipeline":
        """Load by segments; shared ones stay until every rank on this host has attached them."""
        with self._begin(stay) as (load, rules):
            pipe = self._build(load, rules)
            if stay is Stay.SHARED and local_world_size() > 1:
                linger(load.holdings.segments())
        return pipe

    def by_shared_segments(self) -> "DiffusionPipeline | None":
        """Load by shared segments. If there is no room and a ring is possible, return None."""
        try:
            return self.by_segments(Stay.SHARED)
        except (MemoryLimitExceeded, SharedMemoryFull):
            if not self.route.may_stream:
                raise
        logger.warning(
            "%s: no room to share segments; each rank reads by itself",
            self.source.given,
        )
        return None

    def by_ring(self, ring: Ring) -> "DiffusionPipeline | None":
        """Load by a ring and close it; return None if building reads weights on the host."""
        try:
            with ring, self._begin(Stay.PRIVATE, ring) as (load, rules):
                return self._build(load, rules, ring)
        except BytesNeeded:
            pass  # and leave this block: in it the exception keeps the half-built models alive
        if self.route.destination:
            self.route.destination.require_no_limit(self.source)
        logger.info("%s: building reads weights on the host; no ring", self.source.given)
        return None

    def _begin(
        self, stay: Stay, ring: Ring | None = None
    ) -> contextlib.AbstractContextManager[tuple[Load, Rules]]:
        return begin_early(
            self.source,
            self.dtype,
            stay=stay,
            progress=self.progress,
            workers=self.workers,
            is_raw=self.route.is_bypassed,
            ring=ring,
        )

    def _build(self, load: Load, rules: Rules, ring: Ring | None = None) -> "DiffusionPipeline":
        """Build the pipeline and copy it to its devices."""
        # Not at the top: importing torch takes a second, while workers already decode.
        from shmload.integrations._building.build import Build
        from shmload.integrations.placing import place_pipeline

        place = None
        if self.route.destination:
            place = functools.partial(
                place_pipeline, destination=self.route.destination, load=load, ring=ring
            )
        build = Build(self.source, rules, load, self.dtype, self.kwargs, place, self.left_out)
        with self.progress.steps.during(Step.BUILDING):
            return build.run(verify=self.verify)
