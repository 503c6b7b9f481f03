"""Checkpoints of many tensors, in a fresh process each: `python key_probes.py NAME ARGUMENTS`.

As in `probes`, only the standard library is imported at the top.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

Numbers = dict[str, float]


def tensors(*paths: str) -> Numbers:
    """Load checkpoints of many tensors; a result's name begins with the file's stem.

    Returns:
        For each file, each a median of three: `cast_s` to bfloat16, `same_s` without a cast,
        `keep_s` into a resident segment, `attach_s` of that segment, `plan_s` of `plan`, and
        `load_file_s` of safetensors.
    """
    import safetensors.torch

    import shmload

    def keep(path: str) -> tuple[float, float]:
        """Time the making of a segment, then attaching it."""
        timed = partial(shmload.load_state_dict, path, keep=True)
        times = _time(timed), _time(timed)
        shmload.evict(path)
        return times

    found: Numbers = {}
    for path in (paths[0], *paths):  # the first file twice: its first round pays for imports
        calls: dict[str, Callable[[], object]] = {
            "plan_s": partial(shmload.plan, path, dtype="bfloat16"),
            "cast_s": partial(shmload.load_state_dict, path, "bfloat16"),
            "same_s": partial(shmload.load_state_dict, path),
            "load_file_s": partial(safetensors.torch.load_file, path),
        }
        times = {name: [_time(call) for _ in range(3)] for name, call in calls.items()}
        kept = [keep(path) for _ in range(3)]
        times |= {"keep_s": [each for each, _ in kept], "attach_s": [each for _, each in kept]}
        found |= {f"{Path(path).stem} {name}": statistics.median(t) for name, t in times.items()}
    return found


def model(way: str, small: str, source: str) -> Numbers:
    """Load a transformer of Flux's class in bfloat16, in a process that has loaded a small one.

    Returns:
        `call_s`; `keys`, how many tensors the model has.
    """
    import torch
    from diffusers import FluxTransformer2DModel

    import shmload

    def load(path: str) -> torch.nn.Module:
        if way == "shmload":
            return shmload.load_model(FluxTransformer2DModel, path, dtype="bfloat16", keep=True)
        return FluxTransformer2DModel.from_pretrained(path, torch_dtype=torch.bfloat16)

    load(small)
    gc.collect()
    began = time.perf_counter()
    made = load(source)
    return {"call_s": time.perf_counter() - began, "keys": len(made.state_dict())}


def _time(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds; drop its result after the clock stops."""
    began = time.perf_counter()
    result = call()
    elapsed_s = time.perf_counter() - began
    del result
    return elapsed_s


if __name__ == "__main__":
    probes: dict[str, Callable[..., Numbers]] = {"tensors": tensors, "model": model}
    print(json.dumps(probes[sys.argv[1]](*json.loads(sys.argv[2]))))
