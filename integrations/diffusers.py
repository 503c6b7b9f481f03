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
from shmload._checkpoints.resolve import Source, components_with_weights
from shmload._checkpoints.wanted import Wanted
from shmload._decoding.ring import Ring
from shmload._host.collector import paused_gc
from shmload._loading.load import Load
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import Rules
from shmload._segments.segment import Stay
from shmload._settings import local_world_size
from shmload.errors import MemoryLimitExceeded, SharedMemoryFull, SourceNotFound
from shmload.integrations._build.early import begin_early
from shmload.integrations._build.route import Route, choose_route, parse_destination
from shmload.integrations._devices.hollow import BytesNeeded
from shmload.integrations._devices.ways import Pin
from shmload.integrations.ranks import linger

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)


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
    variant = kwargs.get("variant")
    wanted = Wanted.parse(
        source, torch_dtype, components, variant, kwargs, is_pipeline=True, has_others=True
    )
    # It asks for large reads instead of page faults. The workers read so in any case.
    kwargs.pop("disable_mmap", None)
    found = _find_pipeline(wanted, kwargs)
    destination = parse_destination(device_map, max_memory, max_host_memory, pin, kwargs)
    route = choose_route(
        found,
        wanted.dtype,
        destination,
        kwargs,
        keep=keep,
        share=share,
        verify=verify,
        is_bounded=max_host_memory is not None,
    )
    with paused_gc(), Progress(progress, found.root.name) as counter:
        attempt = _Attempt(
            source=found,
            dtype=wanted.dtype,
            route=route,
            kwargs=kwargs,
            workers=workers,
            verify=verify,
            progress=counter,
        )
        if route.tries_to_share and (pipe := attempt.by_shared_segments()) is not None:
            return pipe
        if (ring := route.open_ring(found)) and (pipe := attempt.by_ring(ring)) is not None:
            return pipe
        return attempt.by_segments(route.stay)


def _find_pipeline(wanted: Wanted, kwargs: dict[str, Any]) -> Source:
    """Find a pipeline; in `kwargs`, set its components with weights to None that are not wanted."""
    found = find_source(wanted, kwargs)
    if not found.is_pipeline:
        raise SourceNotFound(
            wanted.source,
            "not a pipeline (no model_index.json); use load_state_dict or view for it",
        )
    if wanted.components is not None:
        others = components_with_weights(found).difference(wanted.components, kwargs)
        kwargs.update(dict.fromkeys(others))
    return found


class _Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `load_pipeline`: each method decodes and builds the pipeline in its way."""

    source: Source
    dtype: object
    route: Route
    kwargs: dict[str, Any]
    """For `from_pretrained`."""
    workers: int | None
    verify: bool
    progress: Progress

    def by_segments(self, stay: Stay) -> "DiffusionPipeline":
        """Load by segments; shared ones stay until every rank on this host has attached them."""
        with self._begin(stay) as (load, rules):
            pipe = self._build(load, rules)
            if stay is Stay.SHARED and local_world_size() > 1:
                linger(load.holdings.segments())
        return pipe

    def by_shared_segments(self) -> "DiffusionPipeline | None":
        """Load by shared segments, or return None if a ring has room where these have none."""
        try:
            return self.by_segments(Stay.SHARED)
        except (MemoryLimitExceeded, SharedMemoryFull):
            if not self.route.may_stream:
                raise
        logger.warning(
            "%s: no room to share it in; each rank reads it by itself", self.source.given
        )
        return None

    def by_ring(self, ring: Ring) -> "DiffusionPipeline | None":
        """Load by a ring, which is closed; return None if weights are needed on the host."""
        try:
            with ring, self._begin(Stay.PRIVATE, ring) as (load, rules):
                return self._build(load, rules, ring)
        except BytesNeeded:
            pass  # and leave this block: in it the exception keeps the half-built models alive
        if self.route.destination:
            self.route.destination.require_no_limit(self.source)
        logger.info("%s: weights are wanted on the host first", self.source.given)
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
        # Not at the top: torch takes a second, in which workers decode.
        from shmload.integrations._build.build import Build
        from shmload.integrations.placing import place_pipeline

        place = None
        if self.route.destination:
            place = functools.partial(
                place_pipeline, destination=self.route.destination, load=load, ring=ring
            )
        build = Build(self.source, rules, load, self.dtype, self.kwargs, place)
        return build.run(verify=self.verify)
