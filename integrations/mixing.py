"""`mix`: a pipeline with LoRAs fused into it, made once for all processes of this user."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmload._building.once import make_once, name_of, stamps_of
from shmload._checkpoints.formats.known import is_of_weights, read_header
from shmload._checkpoints.wanted import expand_home
from shmload.errors import ArgumentError, SourceNotFound
from shmload.integrations.diffusers import load_pipeline

_Path = str | os.PathLike[str]
_Lora = _Path | tuple[_Path, float]
_FLOAT32_NBYTES = 4
# Of the modules of a pipeline: 0.2 to 0.7 MB with 300 to 1,500 tensors.
_STRUCTURE_NBYTES = 700_000
# What the two factors of a product are called.
_PAIRS = (("lora_B", "lora_A"), ("lora_up", "lora_down"), ("lora.up", "lora.down"))
# Arguments that say how it is loaded, and not what.
_HOW = {"progress", "verify", "workers"}


def mix(
    source: _Path,
    loras: Sequence[_Lora],
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
    mixture = Mixture(source, loras, dtype, load_kwargs)
    return make_once(mixture.name, mixture.make)


class Mixture:
    """A base and LoRAs, and the name of what is made of them.

    Raises:
        ArgumentError, SourceNotFound: as `mix`.
    """

    def __init__(
        self, source: _Path, loras: Sequence[_Lora], dtype: Any, load_kwargs: Mapping[str, Any]
    ) -> None:
        wanted = [(each, 1.0) if isinstance(each, str | os.PathLike) else each for each in loras]
        if not wanted:
            raise ArgumentError("mix() needs LoRAs; load_pipeline loads a pipeline without")
        self._files = [(_local(path), float(scale)) for path, scale in wanted]
        self._source = source
        self._root = _local(source)
        self._dtype = dtype
        self._load_kwargs = load_kwargs
        facts = {
            "loras": [
                [os.path.realpath(path), stamps_of(path), scale] for path, scale in self._files
            ],
            # A dtype and its name mean the same.
            "dtype": dtype if isinstance(dtype, Mapping) else str(dtype).removeprefix("torch."),
            "given": {name: each for name, each in load_kwargs.items() if name not in _HOW},
        }
        name = name_of("mixed", self._root, facts)
        if name is None:
            raise ArgumentError("mix() takes names, numbers and classes as arguments, no objects")
        self.name = name

    def make(self) -> Any:
        """Load the base and fuse the LoRAs into it."""
        pipe = load_pipeline(self._source, dtype=self._dtype, keep=True, **self._load_kwargs)
        _fuse(pipe, self._files)
        return pipe

    def changed_nbytes(self) -> int | None:
        """Return how much the LoRAs change at most, in bytes; None if their files do not tell it.

        That is rows times columns of each product, in float32.
        """
        changed = 0
        for path, _ in self._files:
            files = path.iterdir() if path.is_dir() else [path]
            for file in (each for each in files if is_of_weights(each.name)):
                found = _products_in(file)
                if not found:  # its products have other factors
                    return None
                changed += found * _FLOAT32_NBYTES
        return changed or None

    @property
    def structure_nbytes(self) -> int:
        """How much is published besides, in bytes, as an estimate: settings and tokenizers."""
        files = (path for path in self._root.rglob("*") if path.is_file())
        others = sum(path.stat().st_size for path in files if not is_of_weights(path.name))
        return _STRUCTURE_NBYTES + 2 * others


def _products_in(path: Path) -> int:
    """Return the number of elements of all products of a file; 0 if it has none."""
    with path.open("rb") as file:
        header = read_header(file.fileno(), path)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    return sum(
        shapes[name][0] * math.prod(shapes[below][1:])
        for name in shapes
        for up, down in _PAIRS
        if up in name and (below := name.replace(up, down)) in shapes
    )


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
