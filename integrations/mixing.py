"""`mix`: a pipeline with LoRAs fused into it, made once for all processes of this user."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmload._building.once import make_once, name_of, stamps_of
from shmload._checkpoints.wanted import expand_home
from shmload.errors import ArgumentError, SourceNotFound
from shmload.integrations.diffusers import load_pipeline

_Path = str | os.PathLike[str]
# Arguments that say how it is loaded, and not what.
_HOW = {"progress", "verify", "workers"}


def mix(
    source: _Path,
    loras: Sequence[_Path | tuple[_Path, float]],
    *,
    dtype: Any = None,
    **load_kwargs: Any,
) -> Any:
    """Load a pipeline, and fuse LoRAs into it; later processes attach the result.

    The first call has diffusers load and fuse them, and publishes what changed. The result is that
    of `load_lora_weights` and `fuse_lora(lora_scale=SCALE)`; of several LoRAs that of
    `set_adapters(names, scales)` and `fuse_lora()`. Then the adapters are unloaded. It may be
    evicted to make room, and is made again.

    Args:
        source: a directory, as for `load_pipeline`.
        loras: files or directories of LoRAs, each alone or with its scale (1.0 by default); in
            this order.
        dtype: as for `load_pipeline`.
        load_kwargs: other arguments of `load_pipeline`: names, numbers, and classes.

    Returns:
        The pipeline.

    Raises:
        ArgumentError: there are no LoRAs, or an argument is an object that cannot be compared.
        SourceNotFound: the source or a LoRA is not a local path.
        Exception: any error of diffusers.
    """
    wanted = [(each, 1.0) if isinstance(each, str | os.PathLike) else each for each in loras]
    if not wanted:
        raise ArgumentError("mix() needs LoRAs; load_pipeline loads a pipeline without")
    files = [(_local(path), float(scale)) for path, scale in wanted]
    root = _local(source)
    facts = {
        "loras": [[os.path.realpath(path), stamps_of(path), scale] for path, scale in files],
        "dtype": dtype,
        "given": {name: each for name, each in load_kwargs.items() if name not in _HOW},
    }
    name = name_of("mixed", root, facts)
    if name is None:
        raise ArgumentError("mix() takes names, numbers and classes as arguments, no objects")

    def make() -> Any:
        pipe = load_pipeline(root, dtype=dtype, keep=True, **load_kwargs)
        _fuse(pipe, files)
        return pipe

    return make_once(name, make)


def _local(path: _Path) -> Path:
    found = Path(expand_home(path))
    if not found.exists():
        raise SourceNotFound(path, "no such file or directory; mix() takes local paths")
    return found


def _fuse(pipe: Any, files: Sequence[tuple[Path, float]]) -> None:
    names = [f"lora_{number}" for number in range(len(files))]
    for name, (path, _) in zip(names, files, strict=True):
        if path.is_dir():
            pipe.load_lora_weights(str(path), adapter_name=name)
        else:
            pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
    scales = [scale for _, scale in files]
    if len(files) == 1:
        pipe.fuse_lora(lora_scale=scales[0])
    else:
        pipe.set_adapters(names, scales)
        pipe.fuse_lora(adapter_names=names)
    pipe.unload_lora_weights()
