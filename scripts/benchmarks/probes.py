"""What measured processes run: fresh Python processes that measure themselves.

`Bench.ask` starts one for a function of a suite. Such a function imports what it measures itself,
before its clock starts, so that only the standard library and the harness are there at its begin.
"""

import gc
import importlib
import itertools
import json
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from shmload._host.procfs import rollup_nbytes

Numbers = dict[str, float]

_PAGE_NBYTES = 4096
_BLOCK_NBYTES = 1 << 20
_DISK_BLOCK_NBYTES = 8 << 20


def main() -> None:
    """Call the function of a module with JSON arguments, and print its result as the last line."""
    module, name, arguments = sys.argv[1:]
    found = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print("\n" + json.dumps(found), flush=True)


def command_of(function: Callable[..., Any], *arguments: object) -> list[str]:
    """Return the command of a process that calls a function of a module; paths become text."""
    texts = [str(each) if isinstance(each, Path) else each for each in arguments]
    code = "from benchmarks.probes import main; main()"
    where = function.__module__, function.__name__
    return [sys.executable, "-P", "-W", "ignore", "-c", code, *where, json.dumps(texts)]


def touch(models: Iterable[Any]) -> int:
    """Read one byte of every page of every weight; return the weights' size in bytes."""
    import torch

    from shmload._building.mapped import plain_tensors

    nbytes = 0
    with torch._C.DisableTorchFunctionSubclass():  # diffusers' quantised parameters refuse a sum
        for model in models:
            for tensor in itertools.chain(*map(plain_tensors, model.state_dict().values())):
                flat = tensor.data.reshape(-1).view(torch.uint8)
                flat[::_PAGE_NBYTES].sum()
                nbytes += flat.numel()
    return nbytes


def pss_nbytes(pids: Iterable[int]) -> int:
    """Return the memory of some processes together; shared pages count once."""
    return sum(rollup_nbytes(pid, "Pss:") for pid in pids)


# Floors -------------------------------------------------------------------------------------------


def cast_files(*paths: str) -> Numbers:
    """Read safetensors files of float32, cast to bfloat16 and write, in the plainest fast way.

    No digest, no look for NaNs, no plan; the written files have no name.
    """
    import ml_dtypes
    import numpy as np

    buffer = bytearray(_BLOCK_NBYTES)
    cast = np.empty(_BLOCK_NBYTES // 4, ml_dtypes.bfloat16)
    nbytes = 0
    began = time.perf_counter()
    for path in paths:
        with (
            open(path, "rb", buffering=0) as shard,
            tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as target,
        ):
            shard.seek(8 + int.from_bytes(shard.read(8), "little"))
            while got := shard.readinto(buffer):
                cast[: got // 4] = np.frombuffer(buffer, np.float32, got // 4)
                target.write(cast[: got // 4].view(np.uint8).data)
                nbytes += got
    return {"bytes_per_s": nbytes / (time.perf_counter() - began)}


def read_files(*paths: str) -> Numbers:
    """Read files one after the other, past the page cache."""
    nbytes = 0
    with mmap.mmap(-1, _DISK_BLOCK_NBYTES) as buffer:
        buffer.write(bytes(_DISK_BLOCK_NBYTES))  # its pages are there before the clock starts
        began = time.perf_counter()
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            offset = 0
            while got := os.preadv(fd, [buffer], offset):
                offset += got
                if got % _PAGE_NBYTES:
                    break  # the end of the file
            os.close(fd)
            nbytes += offset
    return {"bytes_per_s": nbytes / (time.perf_counter() - began)}


# Loads of weights that are in memory --------------------------------------------------------------


def attach(kind: str, way: str, small: str, source: str) -> Numbers:
    """Load a source in bfloat16 in a process that has loaded a small one of the same kind before.

    Args:
        kind: one of `_LOADERS`.
        way: `shmload`, or another for the libraries alone.
        small: the small source, so that no clock counts an import.
        source: to load.

    Returns:
        `call_s` of the call; `touch_s` of reading a byte of each page of each weight after it;
        `private_nbytes`, the growth of the process's private memory over both; `weights_nbytes`.
    """
    load = _LOADERS[kind](way)
    load(small)
    gc.collect()
    before = _private_nbytes()
    began = time.perf_counter()
    models = _models_of(load(source))
    called = time.perf_counter()
    nbytes = touch(models)
    return {
        "call_s": called - began,
        "touch_s": time.perf_counter() - called,
        "private_nbytes": _private_nbytes() - before,
        "weights_nbytes": nbytes,
    }


def _private_nbytes() -> int:
    """Return this process's private memory in bytes: anonymous pages and page tables.

    Private_Dirty would be wrong: it counts a page of a shared segment as private while only this
    process maps it.
    """
    tables = re.search(r"VmPTE:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert tables
    return rollup_nbytes(os.getpid(), "Anonymous:") + int(tables[1]) * 1024


def _models_of(made: Any) -> list[Any]:
    """Return the models of a pipeline, or the model alone."""
    import torch

    parts = [made] if isinstance(made, torch.nn.Module) else made.components.values()
    return [part for part in parts if isinstance(part, torch.nn.Module)]


Load = Callable[[str], Any]


def _pipeline(way: str) -> Load:
    """Load a directory of Stable Diffusion."""
    import torch
    from diffusers import StableDiffusionPipeline

    import shmload

    if way == "shmload":
        return partial(shmload.load_pipeline, dtype=torch.bfloat16, keep=True)
    return partial(StableDiffusionPipeline.from_pretrained, torch_dtype=torch.bfloat16)


def _file(way: str) -> Load:
    """Load Stable Diffusion from one file, with the directory `config` beside it."""
    import torch
    from diffusers import StableDiffusionPipeline

    import shmload

    def load(source: str) -> Any:
        path, config = os.path.join(source, "model.safetensors"), os.path.join(source, "config")
        if way == "shmload":
            return shmload.load_pipeline(path, config=config, dtype=torch.bfloat16, keep=True)
        return StableDiffusionPipeline.from_single_file(
            path, config=config, torch_dtype=torch.bfloat16
        )

    return load


def _gguf(way: str) -> Load:
    """Load a quantised transformer of Flux's class from `model.gguf`, with `config` beside it."""
    import torch
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    import shmload

    def load(source: str) -> Any:
        path = os.path.join(source, "model.gguf")
        given: dict[str, Any] = {
            "config": os.path.join(source, "config"),
            "quantization_config": GGUFQuantizationConfig(compute_dtype=torch.bfloat16),
        }
        if way == "shmload":
            model_class = "FluxTransformer2DModel"
            return shmload.load_model(model_class, path, dtype=torch.bfloat16, keep=True, **given)
        return FluxTransformer2DModel.from_single_file(path, torch_dtype=torch.bfloat16, **given)

    return load


_LOADERS: dict[str, Callable[[str], Load]] = {
    "pipeline": _pipeline,
    "file": _file,
    "gguf": _gguf,
}
"""Returns what loads a source, by its kind; given the way."""
