"""`load_pipeline`: a diffusion pipeline whose weights lie in shared memory.

Guarantee: what it returns equals what `from_pretrained` gives with the same arguments, or it
raises.
"""

import os
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from shmload._building.call import Call, note
from shmload._building.makers import PipelineMaker
from shmload._building.options import Keep, Options
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.wanted import (
    is_publication,
)
from shmload._checkpoints.weights import is_single_file
from shmload._host.collector import freeze_imports, paused_gc
from shmload._loading.trace import Phase, during, tracing
from shmload.errors import ArgumentError
from shmload.integrations.models import load_model

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

    from shmload._building.maker import Maker
    from shmload._loading.progress import Callback

_Pipeline = TypeVar("_Pipeline", bound="DiffusionPipeline")


# For type checkers. What the source chooses may be any class, and the base of all cannot be called.
@overload
def load_pipeline(
    source: str | os.PathLike[str],
    *,
    pipeline_class: type[_Pipeline],
    dtype: "str | torch.dtype | Mapping[str, str | torch.dtype | None] | None" = None,
    **arguments: Any,
) -> _Pipeline: ...
@overload
def load_pipeline(
    source: str | os.PathLike[str],
    *,
    pipeline_class: type | str | None = None,
    dtype: "str | torch.dtype | Mapping[str, str | torch.dtype | None] | None" = None,
    device_map: object = None,
    max_memory: Mapping[Any, object] | None = None,
    max_host_memory: float | str | None = None,
    components: Collection[str] | None = None,
    keep: Keep = False,
    share: bool | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: "Callback | bool | None" = None,
    trace: str | os.PathLike[str] | None = None,
    **from_pretrained_kwargs: Any,
) -> Any: ...
def load_pipeline(
    source: str | os.PathLike[str],
    *,
    pipeline_class: "type[DiffusionPipeline] | type | str | None" = None,
    dtype: object = None,
    device_map: object = None,
    max_memory: Mapping[Any, object] | None = None,
    max_host_memory: float | str | None = None,
    components: Collection[str] | None = None,
    keep: Keep = False,
    share: bool | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: "Callback | bool | None" = None,
    trace: str | os.PathLike[str] | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a diffusion pipeline through shared memory.

    Several threads may call it. They decode in parallel and build one after the other, because the
    libraries' own loading is not thread-safe.

    Args:
        source: a directory or a hub id, as for `DiffusionPipeline.from_pretrained`. Or a file of
            weights: the call then means `from_single_file`, and takes its arguments, as `config`.
            Or a modular repository: the call then means `ModularPipeline.from_pretrained` and its
            `load_components`, with the arguments of both. Or a publication, `shm:NAME` or
            `shm:NAME@VERSION`: it is returned as it was published, and no other argument counts.
        pipeline_class: the class to load, by itself or by its name: one of diffusers, such as
            `StableDiffusionImg2ImgPipeline` or `AutoPipelineForInpainting`, or your own subclass
            (as a name: `module.Class`). None for the class that the source names.
        dtype: a `torch.dtype`, its name, `auto`, or a dict of these by component (with a
            `default`). None means the same as for `from_pretrained`: float32 for models of
            diffusers, the checkpoint's own dtype for models of transformers. `auto` means the
            checkpoint's own dtype for all. A name or `auto` counts, unlike in diffusers, which
            loads float32 for a text.
        device_map: where the models go. None leaves them on the CPU. It may be one device; a
            strategy (`balanced`, `balanced_low_0`, `sequential`, `auto`); or a dict of devices by
            component, pattern or dotted path, in which `cpu`, `offload` and `meta` are devices
            too. `auto` also divides models, and offloads weights to the CPU if the accelerators are
            too small.
        max_memory: the most that weights may take of each device, in bytes or as `20GiB`.
        max_host_memory: the most host memory that weights may take on their way to accelerators,
            in bytes or as `512MiB`. All weights must go to accelerators.
        components: load only these of the components with weights; the others are None. Components
            without weights, such as tokenizers, are always loaded.
        keep: leave the segments resident for the next process; with True also what this call has
            built of them, which later calls get, with or without `keep`. `converted`: only segments
            that had to be made; local files that have the wanted dtypes are mapped themselves, as
            with False. False: new segments belong to this pipeline and go with its last tensor;
            segments that were resident stay; of weights that all go to accelerators the host holds
            only a part at a time.
        share: let other processes attach the segments as long as any process has them. None means
            True for one of several ranks on this host, and keeps the segments at least until all
            ranks have attached them; it means False with `max_host_memory`, or when there is no
            room to share and all weights go to accelerators.
        workers: number of worker processes; None for as many as there are spare cores.
        verify: recompute the digests of all segments, resident ones too.
        progress: a function that gets bytes done and bytes in all; True or False for a bar or
            none; None for a bar on a terminal.
        trace: a file that gets where the time of this call goes, as a Chrome trace, also if it
            fails; None for the file that `SHMLOAD_TRACE` names, or else for none. A file that has
            traces keeps them.
        from_pretrained_kwargs: all other arguments of `from_pretrained`. Components may be passed;
            their weights are not decoded.

    Returns:
        The pipeline. On the CPU its parameters are mapped from
        the segments copy-on-write: a write is private to this process. On other devices they have
        memory of their own, aligned to 256 bytes.

    Raises:
        ShmloadError: the source, its files, a worker, or the room for the weights is at fault;
            `CheckpointError` if a component of a modular pipeline is missing, or cannot be loaded.
        Exception: any error of `from_pretrained`, with the source's paths instead of the view's.
    """
    with tracing(trace, str(source)):
        options = Options(
            device_map=device_map,
            max_memory=max_memory,
            max_host_memory=max_host_memory,
            keep=keep,
            share=share,
            workers=workers,
            verify=verify,
            progress=progress,
        )
        if is_publication(source):
            from shmload._building.publishing import load_published

            given = {
                "pipeline_class": pipeline_class,
                "dtype": dtype,
                "components": components,
            } | options.devices
            return load_published(str(source), given | from_pretrained_kwargs)
        call = Call.parse(
            load_pipeline,
            pipeline_class,
            source,
            dtype,
            options,
            from_pretrained_kwargs,
            components=components,
            is_pipeline=True,
        )
        made = _load(call)
        note(made, call)
        return made


def _load(call: Call) -> Any:
    wanted, kwargs = call.wanted, dict(call.kwargs)
    if is_single_file(wanted.source):
        from shmload._building.single_file import SinglePipelineMaker, bring_single_file

        with during(Phase.FIND):
            wanted = bring_single_file(wanted)
        maker: Maker = SinglePipelineMaker(call.cls, wanted, kwargs.get("config"))
        with during(Phase.FIND):
            found, dtype = maker.find(wanted, kwargs)
        return call.answer(maker, found, dtype, kwargs)
    pipelines = PipelineMaker(call.cls)
    with during(Phase.FIND):
        found, dtype = pipelines.find(wanted, kwargs)
    if pipelines.makes_modular(found):
        return _load_modular(call)
    return call.answer(pipelines, found, dtype, kwargs)


def _load_modular(call: Call) -> Any:
    """Load a modular pipeline: the library makes it, and `load_model` each of its models."""
    devices = call.options.device_map

    def load_component(component: str, cls: Any, source: str, **given: Any) -> Any:
        own = msgspec.structs.asdict(call.options)
        if isinstance(devices, Mapping):
            own["device_map"] = devices.get(component, devices.get("default"))
        if own["device_map"] is None:  # what bounds a copy to devices
            own |= {"max_memory": None, "max_host_memory": None}
        return load_model(cls, source, **own, **given)

    if is_url(call.wanted.source):
        raise ArgumentError(
            f"{call.wanted.source} is a modular pipeline: the library reads none from a URL; "
            "download it, and give its directory"
        )
    by_name = devices if isinstance(devices, Mapping) else {}
    is_cold = "diffusers" not in sys.modules
    with whole_libraries(), paused_gc():
        # Not at the top: it imports diffusers.
        from shmload._building.modular import make_modular

        if is_cold:
            freeze_imports()
        return make_modular(call.wanted, call.cls, call.kwargs, by_name, load_component)
