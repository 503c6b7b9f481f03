"""Loads to a GPU, each in a fresh process.

The clock starts after all imports, CUDA's initialisation and a small load. It stops when the device
is idle again.

With BENCH_DEVICE=pretend the host takes the GPU's place, to try the suite on a machine without one.
Only this module reads that variable, and `describe` reports it.
"""

import gc
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.probes import Numbers

_IS_PRETENDED = os.environ.get("BENCH_DEVICE") == "pretend"
# The device for the libraries; shmload always gets "cuda".
_DEVICE = "cpu" if _IS_PRETENDED else "cuda:0"
_FLOOR_NBYTES = 1 << 30
_FLOOR_COPIES = 8
# Components that the pipelines lack; FluxPipeline wants them as None.
_ABSENT: dict[str, Any] = dict.fromkeys(
    ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
)


def describe() -> dict[str, str]:
    """Return facts about the GPU; empty without one."""
    if _IS_PRETENDED:
        return {"GPU": "no GPU: pretended"}
    import torch

    if not torch.cuda.is_available():
        return {}
    facts = torch.cuda.get_device_properties(0)
    asked = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", "--id=0", f"--query-gpu={asked}", "--format=csv,noheader"]
    return {
        "GPU": f"{facts.name}, {facts.total_memory / 2**30:.1f} GiB",
        "CUDA": str(torch.version.cuda),
        "driver, PCIe generation and lanes": subprocess.check_output(command, text=True).strip(),
    }


def _begin() -> None:
    """Initialise CUDA, or put the host in its place."""
    if _IS_PRETENDED:
        from benchmarks.pretended import pretend

        pretend()
        return
    import torch

    torch.zeros(1, device=_DEVICE)


def _time(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds; drop its result after the clock stops."""
    _wait_for_device()
    began = time.perf_counter()
    result = call()
    _wait_for_device()
    elapsed_s = time.perf_counter() - began
    del result
    _tidy_up()
    return elapsed_s


def _wait_for_device() -> None:
    import torch

    if not _IS_PRETENDED:
        torch.cuda.synchronize()


def _tidy_up() -> None:
    """Free the device's cached memory, so that the next load allocates like the first."""
    import torch

    gc.collect()
    if not _IS_PRETENDED:
        torch.cuda.empty_cache()


# Pipelines ----------------------------------------------------------------------------------------


def load(way: str, small: str, source: str) -> Numbers:
    """Load a pipeline in bfloat16 to the GPU; return `call_s`."""
    _begin()
    call = _LOADERS[way]
    call(small)
    _tidy_up()
    return {"call_s": _time(partial(call, source))}


def _load_with_shmload(source: str, **given: Any) -> Any:
    import torch

    import shmload

    given = {"device_map": "cuda"} | given
    return shmload.load_pipeline(source, dtype=torch.bfloat16, **given, **_ABSENT)


def _load_with_diffusers(source: str) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    # diffusers accepts a device type or a strategy as device_map, no index.
    device = _DEVICE.partition(":")[0]
    return DiffusionPipeline.from_pretrained(
        source, torch_dtype=torch.bfloat16, device_map=device, **_ABSENT
    )


_LOADERS: dict[str, Callable[..., Any]] = {
    "shmload": _load_with_shmload,
    "diffusers": _load_with_diffusers,
}


# Copies -------------------------------------------------------------------------------------------


def uploads(small: str, source: str) -> Numbers:
    """Load a resident pipeline to the GPU; time only the copy.

    Returns:
        Bytes per second: `pinned` and `pageable` for plain copies; `load_pipeline` for the copy
        inside it, with its allocations on the GPU; `to_device` for that whole call.
    """
    _begin()
    import shmload
    from shmload._loading.trace import Phase, tracing

    _load_with_shmload(small)
    rates = {"pinned": _plain_rate(is_pinned=not _IS_PRETENDED)}
    rates["pageable"] = _plain_rate(is_pinned=False)
    module = _load_with_shmload(source, keep=True, device_map=None).transformer
    nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    rates["to_device"] = nbytes / _time(partial(shmload.to_device, module, "cuda"))
    del module
    _tidy_up()
    with tracing(None, source) as trace:
        _time(partial(_load_with_shmload, source))
    rates["load_pipeline"] = nbytes / trace.times_s()[Phase.COPY]
    return {f"{name}_bytes_per_s": rate for name, rate in rates.items()}


def _plain_rate(*, is_pinned: bool) -> float:
    """Copy host memory to the device, page-locked or not; return bytes per second."""
    import torch

    source = torch.empty(_FLOOR_NBYTES, dtype=torch.uint8, pin_memory=is_pinned).fill_(1)
    target = torch.empty_like(source, device=_DEVICE)

    def copy() -> None:
        for _ in range(_FLOOR_COPIES):
            target.copy_(source, non_blocking=True)

    target.copy_(source)
    return _FLOOR_COPIES * _FLOOR_NBYTES / _time(copy)
