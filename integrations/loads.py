"""`load_pipeline` and `load_model`: a pipeline, or one model, whose weights lie in shared memory.

Guarantee: what they return equals what `from_pretrained` gives with the same arguments, or they
raise.
"""

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from shmload._building.call import Call, note
from shmload._building.makers import ModelMaker, PipelineMaker
from shmload._building.options import Keep, Options
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.wanted import is_publication
from shmload._checkpoints.weights import is_single_file
from shmload._host.collector import freezing_imports, paused_gc
from shmload._loading.trace import Phase, during, tracing
from shmload.errors import ArgumentError

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
        The pipeline. On the CPU its parameters are mapped from the segments copy-on-write: a write
        is private to this process. On other devices they have memory of their own, aligned to 256
        bytes.

    Raises:
        ShmloadError: the source, its files, a worker, or the room for the weights is at fault;
            `CheckpointError` if a component of a modular pipeline is missing, or cannot be loaded.
        Exception: any error of `from_pretrained`, with the source's paths instead of the view's.
    """
    with paused_gc(), tracing(trace, str(source)):
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

            own = {"pipeline_class": pipeline_class, "dtype": dtype, "components": components}
            given = own | options.devices | from_pretrained_kwargs
            return load_published(str(source), given)
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
        made = _load_pipeline(call)
        note(made, call)
        return made


def load_model(
    cls: type | str,
    source: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    variant: str | None = None,
    dtype: object = None,
    device_map: object = None,
    max_memory: Mapping[Any, object] | None = None,
    max_host_memory: float | str | None = None,
    keep: Keep = False,
    share: bool | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: "Callback | bool | None" = None,
    trace: str | os.PathLike[str] | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load one model of diffusers or transformers through shared memory.

    `load_model(cls, source, ...)` means what `cls.from_pretrained(source, ...)` means; of a file it
    means `cls.from_single_file`. Adapters, and files in formats that shmload does not read, are
    left to the library, which loads them as ever.

    Several threads may call it, as for `load_pipeline`.

    Args:
        cls: the model's class, such as `UNet2DConditionModel` or your own subclass of one; an
            automatic one (`AutoModel` of either library, `AutoModelForCausalLM`); or its name.
            Names without a module are looked up in diffusers and in transformers.
        source: a directory or a hub id, as for `cls.from_pretrained`. Or a file of
            weights: the call then means `from_single_file`, and takes its arguments, as `config`.
            Or the publication of a model, as for `load_pipeline`.
        subfolder: the model's directory in the source, such as `unet` in a pipeline.
        variant: as for `from_pretrained`, such as `fp16`.
        dtype: a `torch.dtype`, its name, or `auto` for the checkpoint's own dtype. None means what
            it means for the class: float32 for models of diffusers. Names and `auto` count for
            these too, unlike in diffusers, which loads float32 for a text.
        device_map: as for `load_pipeline`, but by the paths of the modules in the model. Quantised
            weights are copied by the library, as the class means the map.
        max_memory: as for `load_pipeline`.
        max_host_memory: as for `load_pipeline`.
        keep: as for `load_pipeline`.
        share: as for `load_pipeline`.
        workers: as for `load_pipeline`.
        verify: as for `load_pipeline`.
        progress: as for `load_pipeline`.
        trace: as for `load_pipeline`.
        from_pretrained_kwargs: all other arguments of `from_pretrained`.

    Returns:
        What `from_pretrained` returns: the model, or with `output_loading_info` a tuple. Its
        tensors lie in memory as those of `load_pipeline` do. It names the source wherever the
        library notes it, so what is saved from it loads anywhere.

    Raises:
        ShmloadError: the source, its files, a worker, or the room for the weights is at fault.
        Exception: any error of `from_pretrained`, with the source's paths.
    """
    with paused_gc(), tracing(trace, str(source)):
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

            given = {"subfolder": subfolder, "variant": variant, "dtype": dtype} | options.devices
            model = load_published(str(source), given | from_pretrained_kwargs)
            name = _name_of(cls).rpartition(".")[2]
            names = {each.__name__ for each in type(model).__mro__}
            if name not in names and not name.startswith("AutoModel"):
                raise ArgumentError(
                    f"{source} is a {type(model).__name__}, and no {name}; load_pipeline loads a "
                    "pipeline, which has its models as attributes"
                )
            return model
        kwargs = from_pretrained_kwargs
        # Only what was given: the classes have defaults of their own.
        for name, value in (("subfolder", subfolder), ("variant", variant)):
            if value is not None:
                kwargs[name] = value
        call = Call.parse(load_model, cls, source, dtype, options, kwargs)
        made = _load_model(call, takes_path=not isinstance(source, str))
        note(made, call)
        return made


def _load_pipeline(call: Call) -> Any:
    wanted, kwargs = call.wanted, dict(call.kwargs)
    with during(Phase.FIND):
        if is_single_file(wanted.source):
            from shmload._building.single_file import SinglePipelineMaker, bring_single_file

            wanted = bring_single_file(wanted)
            maker: Maker = SinglePipelineMaker(call.cls, wanted, kwargs.get("config"))
        else:
            maker = PipelineMaker(call.cls)
        found, dtype = maker.find(wanted, kwargs)
    if isinstance(maker, PipelineMaker) and maker.makes_modular(found):
        return _load_modular(call)
    return call.answer(maker, found, dtype, kwargs)


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
    with whole_libraries():
        with freezing_imports():
            # Not at the top: it imports diffusers.
            from shmload._building.modular import make_modular
        return make_modular(call.wanted, call.cls, call.kwargs, by_name, load_component)


def _load_model(call: Call, *, takes_path: bool) -> Any:
    wanted, kwargs = call.wanted, dict(call.kwargs)
    with during(Phase.FIND):
        if is_single_file(wanted.source):
            with during(Phase.IMPORT):  # of torch
                from shmload._building.blocks_maker import maker_of_file
                from shmload._building.single_file import bring_single_file

            wanted = bring_single_file(wanted)
            maker: Maker = maker_of_file(call.cls, wanted.source, kwargs)
        else:
            maker = ModelMaker(call.cls, takes_path=takes_path)
        found, dtype = maker.find(wanted, kwargs)
    return call.answer(maker, found, dtype, kwargs)


def _name_of(cls: type | str) -> str:
    return getattr(cls, "__name__", str(cls))
