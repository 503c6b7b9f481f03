"""Make pipelines with Flux's transformer class as their only model.

    python flux_checkpoints.py float32 DIRECTORY DOUBLE_BLOCKS SINGLE_BLOCKS
    python flux_checkpoints.py bfloat16 DIRECTORY DOUBLE_BLOCKS SINGLE_BLOCKS
    python flux_checkpoints.py small DIRECTORY            the same class, about 100 kB
    python flux_checkpoints.py keys DIRECTORY             the same with 92,018 tensors

With 8 double and 12 single blocks they have 17.9 GB (float32) and 8.9 GB (bfloat16), in shards of 4
GB. The weights are seeded noise. Each thread makes and writes one tensor at a time, so memory holds
a few tensors only.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_NOISE_STD = 0.02
_SHARD_NBYTES = 4_000_000_000
_MAX_THREADS = 16  # each holds a float32 tensor of up to 190 MB, and its conversion
_FILE = "diffusion_pytorch_model"
_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
SMALL = {
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 4, 8),
    "in_channels": 4,
    "joint_attention_dim": 32,
    "num_attention_heads": 2,
    "num_layers": 1,
    "num_single_layers": 1,
    "pooled_projection_dim": 32,
}
"""Configuration of the small transformer."""
_KEYS = SMALL | {"num_layers": 2_000, "num_single_layers": 2_000}

Shapes = Mapping[str, Sequence[int]]


def make_flux(
    directory: Path, config: Mapping[str, Any], dtype: str, shard_nbytes: int = _SHARD_NBYTES
) -> None:
    """Make a pipeline directory.

    Args:
        directory: where to write; must not exist.
        config: of the transformer, where it differs from Flux.1-dev.
        dtype: of the weights: `float32` or `bfloat16`.
        shard_nbytes: size limit of a shard; a larger tensor gets a shard of its own.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(**{"guidance_embeds": True, **config})
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipe = FluxPipeline(scheduler=scheduler, transformer=model, **dict.fromkeys(absent, None))
    pipe.save_config(directory)
    scheduler.save_pretrained(directory / "scheduler")
    model.save_config(directory / "transformer")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _write_weights(directory / "transformer", shapes, dtype, shard_nbytes)


def _write_weights(folder: Path, shapes: Shapes, dtype: str, shard_nbytes: int) -> None:
    """Write shards and, if there are several, their index."""
    _, itemsize = _DTYPES[dtype]
    shards = list(_divide(shapes, itemsize, shard_nbytes))
    names = [f"{_FILE}.safetensors"]
    if len(shards) > 1:
        names = [
            f"{_FILE}-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)
        ]
        index = {
            "metadata": {"total_size": sum(map(math.prod, shapes.values())) * itemsize},
            "weight_map": {
                tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
            },
        }
        (folder / f"{_FILE}.safetensors.index.json").write_text(json.dumps(index, indent=1))
    seeds = {tensor: seed for seed, tensor in enumerate(shapes)}
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, {tensor: shapes[tensor] for tensor in shard}, seeds, dtype)


def _divide(shapes: Shapes, itemsize: int, shard_nbytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each shard, in order."""
    shard: list[str] = []
    used = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if shard and used + nbytes > shard_nbytes:
            yield shard
            shard, used = [], 0
        shard.append(name)
        used += nbytes
    yield shard


def _write_shard(path: Path, shapes: Shapes, seeds: Mapping[str, int], dtype: str) -> None:
    import torch

    code, itemsize = _DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        fd, origin = file.fileno(), 8 + len(text)
        os.posix_fallocate(fd, 0, origin + end)  # a full disk fails here, before the work

        def write(name: str) -> None:
            generator = torch.Generator("cpu").manual_seed(seeds[name])
            noise = torch.empty(math.prod(shapes[name])).normal_(0, _NOISE_STD, generator=generator)
            left = noise.to(getattr(torch, dtype)).view(torch.uint8).numpy().data
            offset = origin + header[name]["data_offsets"][0]
            while left:
                written = os.pwrite(fd, left, offset)
                left, offset = left[written:], offset + written

        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        # One torch thread per pool thread.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(write, shapes))


if __name__ == "__main__":
    kind, directory, *counts = sys.argv[1:]
    if kind in ("small", "keys"):
        make_flux(Path(directory), SMALL if kind == "small" else _KEYS, "bfloat16")
    else:
        double, single = map(int, counts)
        make_flux(Path(directory), {"num_layers": double, "num_single_layers": single}, kind)
