"""`mix`: a pipeline with LoRAs fused into it, made once for all processes of this user."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shmload._building.call import forget
from shmload._building.keys import Incomparable, is_chosen_elsewhere, key_of, spelled
from shmload._building.remembered import once
from shmload._checkpoints.wanted import expand_home
from shmload._host.collector import paused_gc
from shmload.errors import ArgumentError, SourceNotFound
from shmload.integrations.loads import load_pipeline

_Path = str | os.PathLike[str]
_Lora = _Path | tuple[_Path, float] | Mapping[str, Any]
# Arguments that say how it is loaded, and not what.
_HOW = {"progress", "verify", "workers"}
_SECOND = "load_into_transformer_2"


class _Adapter(NamedTuple):
    """A LoRA: a file or a directory, its scale, and arguments of `load_lora_weights`."""

    path: Path
    scale: float
    arguments: dict[str, Any]


def mix(
    source: _Path,
    loras: Sequence[_Lora],
    *,
    dtype: Any = None,
    **load_kwargs: Any,
) -> Any:
    """Load a pipeline, and fuse LoRAs into it; later processes attach the result.

    The first call has diffusers load and fuse them, and keeps what changed. The result is that
    of `load_lora_weights` and `fuse_lora(lora_scale=SCALE)`; of several LoRAs that of
    `set_adapters(names, scales)` and `fuse_lora()`. Then the adapters are unloaded. It may be
    evicted to make room, and is made again.

    Args:
        source: a directory, as for `load_pipeline`.
        loras: files or directories of LoRAs, in this order, each alone or with its scale (1.0 by
            default). Or a dict: `path`, `scale`, and arguments of `load_lora_weights`, such as
            `load_into_transformer_2=True` for the second transformer of Wan 2.2.
        dtype: as for `load_pipeline`.
        load_kwargs: other arguments of `load_pipeline`: names, numbers, and classes.

    Returns:
        The pipeline.

    Raises:
        ArgumentError: there are no LoRAs, one has no path, or an argument is an object that cannot
            be compared.
        SourceNotFound: the source or a LoRA is not a local path.
        Exception: any error of diffusers.
    """
    adapters = [_adapter(each) for each in loras]
    if not adapters:
        raise ArgumentError("mix() needs LoRAs; load_pipeline loads a pipeline without")
    facts = {
        "loras": [[scale, given] for _, scale, given in adapters],
        "given_as": os.fspath(source),
        "dtype": spelled(dtype),
        "given": {name: each for name, each in load_kwargs.items() if name not in _HOW},
    }
    given = [each for each in load_kwargs.values() if isinstance(each, str | os.PathLike)]
    paths = [Path(each) for each in given if os.path.exists(each)]
    read = (_local(source), *(each.path for each in adapters), *paths)
    try:
        key = None if is_chosen_elsewhere(read[0], load_kwargs) else key_of(read, facts)
    except Incomparable as exc:
        raise ArgumentError(
            "mix() takes names, numbers and classes as arguments, no objects"
        ) from exc
    load = functools.partial(load_pipeline, source, dtype=dtype, keep=True, **load_kwargs)

    def make(models: Mapping[str, Any]) -> Any:
        return load(**models) if models else _fused(load(), adapters)

    with paused_gc():
        made = once(key, make, keep=True)
    forget(made)  # the call for the base would not make it again
    return made


def _adapter(lora: _Lora) -> _Adapter:
    if isinstance(lora, Mapping):
        given = dict(lora)
        if "path" not in given:
            raise ArgumentError(f"a LoRA has no path: {given!r}")
        if "adapter_name" in given:
            raise ArgumentError("mix() names the adapters; leave adapter_name out")
        return _Adapter(_local(given.pop("path")), float(given.pop("scale", 1.0)), given)
    path, scale = (lora, 1.0) if isinstance(lora, str | os.PathLike) else lora
    return _Adapter(_local(path), float(scale), {})


def _local(path: _Path) -> Path:
    found = Path(expand_home(path))
    if not found.exists():
        raise SourceNotFound(f"{path}: no such file or directory; mix() takes local paths")
    return found


def _fused(pipe: Any, adapters: Sequence[_Adapter]) -> Any:
    """Fuse adapters into a pipeline, and return it.

    Raises:
        ArgumentError: diffusers would take the first transformer for all that do not say.
    """
    if getattr(pipe, "transformer_2", None) is not None:
        for each in adapters:
            if _SECOND not in each.arguments:
                raise ArgumentError(
                    f"{each.path}: the pipeline has two transformers; say into which it goes: "
                    f"{{'path': ..., {_SECOND!r}: True or False}}"
                )
    names = [f"lora_{number}" for number in range(len(adapters))]
    for name, (path, _, given) in zip(names, adapters, strict=True):
        file = {} if path.is_dir() else {"weight_name": path.name}
        folder = str(path if path.is_dir() else path.parent)
        pipe.load_lora_weights(folder, adapter_name=name, **{**file, **given})
    # By itself diffusers fuses nothing of a second transformer.
    components = list(pipe.get_list_adapters())
    scales = [each.scale for each in adapters]
    if len(adapters) == 1:
        pipe.fuse_lora(components, lora_scale=scales[0])
    else:
        pipe.set_adapters(names, scales)
        pipe.fuse_lora(components, adapter_names=names)
    pipe.unload_lora_weights()
    return pipe
