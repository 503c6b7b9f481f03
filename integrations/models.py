"""`load_model`: one model whose weights lie in shared memory.

Guarantee: what it returns equals what `from_pretrained` of its class gives with the same arguments,
or it raises.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmload._building.call import Call, note
from shmload._building.makers import ModelMaker
from shmload._building.options import Keep, Options
from shmload._checkpoints.wanted import is_publication
from shmload._checkpoints.weights import is_single_file
from shmload._loading.trace import Phase, during, tracing
from shmload.errors import ArgumentError

if TYPE_CHECKING:
    from shmload._building.maker import Maker
    from shmload._loading.progress import Callback


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
        made = _load(call, takes_path=not isinstance(source, str))
        note(made, call)
        return made


def _load(call: Call, *, takes_path: bool) -> Any:
    wanted, kwargs = call.wanted, dict(call.kwargs)
    maker: Maker
    if is_single_file(wanted.source):
        from shmload._building.blocks_maker import maker_of_file
        from shmload._building.single_file import bring_single_file

        with during(Phase.FIND):
            wanted = bring_single_file(wanted)
        maker = maker_of_file(call.cls, wanted.source, kwargs)
    else:
        maker = ModelMaker(call.cls, takes_path=takes_path)
    with during(Phase.FIND):
        found, dtype = maker.find(wanted, kwargs)
    return call.answer(maker, found, dtype, kwargs)


def _name_of(cls: type | str) -> str:
    return getattr(cls, "__name__", str(cls))
