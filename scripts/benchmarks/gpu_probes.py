"""Loads to a GPU, each in a fresh process.

The clock starts after all imports, CUDA's initialisation and a small load. It stops when the device
is idle again.

With BENCH_DEVICE=pretend the host takes the GPU's place, to try the suite on a machine without one.
Only this module reads that variable, and `describe` reports it.
"""

import gc
import importlib.util
import os
import subprocess
import time
import types
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.probes import Numbers, status_nbytes

_IS_PRETENDED = os.environ.get("BENCH_DEVICE") == "pretend"
# The device for other libraries; shmload always gets "cuda".
_DEVICE = "cpu" if _IS_PRETENDED else "cuda:0"
_FLOOR_NBYTES = 1 << 30
_FLOOR_COPIES = 8
_VECTOR_LENGTH = 512  # 1 KiB in bfloat16
# Components that the pipelines lack; FluxPipeline wants them as None.
_ABSENT: dict[str, Any] = dict.fromkeys(
    ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
)


# The machine --------------------------------------------------------------------------------------


def describe() -> dict[str, str]:
    """Return facts about the GPU; empty without one."""
    if _IS_PRETENDED:
        return {"GPU": "no GPU: pretended", "driver": "none", "CUDA": "none"}
    import torch

    if not torch.cuda.is_available():
        return {}
    facts = torch.cuda.get_device_properties(0)
    return {
        "GPU": f"{facts.name}, {facts.total_memory / 2**30:.1f} GiB",
        "driver": _ask_driver("driver_version"),
        "CUDA": str(torch.version.cuda),
        "PCIe": f"generation {_ask_driver('pcie.link.gen.max')}, "
        f"{_ask_driver('pcie.link.width.max')} lanes",
    }


def _ask_driver(field: str) -> str:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _begin() -> None:
    """Initialise CUDA, or put the host in its place."""
    import torch

    if not _IS_PRETENDED:
        torch.zeros(1, device=_DEVICE)
        return
    from shmload._building import placing
    from shmload._placement import inventory

    placing.runtime_of = lambda device: _host_runtime()  # type: ignore[attr-defined]
    inventory.machine_inventory = lambda *_: inventory.parse_inventory("80GiB,cpu=80GiB")


def _host_runtime() -> Any:
    """Return the host in the place of a device: a copy is done when it has been started."""
    import torch

    from shmload._runtimes.runtime import Runtime

    class Host(Runtime):
        def __init__(self) -> None:
            self.device, self.name = torch.device("cpu"), "the host"

        def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for target, source in copies:
                target.copy_(source)

        def follow(self) -> None:
            pass

        join = drain = follow

        def record(self) -> Any:
            return types.SimpleNamespace(synchronize=lambda: None)

        def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
            return True

    return Host()


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


def load(way: str, small: str, source: str, max_host_memory: str | None = None) -> Numbers:
    """Load a pipeline in bfloat16 to the GPU.

    Returns:
        `call_s`; `host_nbytes`, the peak growth of the process's memory (anonymous, shared, and
        files mapped for a while); `bound_nbytes`, the part of it that slots take, and what may be
        decoded ahead.
    """
    _begin()
    call = _loader(way, max_host_memory)
    call(small)
    _tidy_up()
    sizes = _note_bounds() if way == "shmload" else []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident, files = status_nbytes("VmRSS"), status_nbytes("RssFile")
    call_s = _time(partial(call, source))
    # Files still mapped, such as libraries, stay mapped for the life of the process.
    from_files = max(0, status_nbytes("RssFile") - files)
    return {
        "call_s": call_s,
        "host_nbytes": status_nbytes("VmHWM") - resident - from_files,
        "bound_nbytes": sum(sizes),
    }


def _loader(way: str, max_host_memory: str | None = None) -> Callable[[str], Any]:
    import torch

    if way == "shmload":
        import shmload

        return lambda source: shmload.load_pipeline(
            source,
            dtype=torch.bfloat16,
            device_map="cuda",
            max_host_memory=max_host_memory,
            **_ABSENT,
        )
    if way == "accelerate":
        return _load_with_accelerate
    from diffusers import DiffusionPipeline

    # diffusers accepts a device type or a strategy as device_map, no index.
    device = _DEVICE.partition(":")[0]
    return lambda source: DiffusionPipeline.from_pretrained(
        source, torch_dtype=torch.bfloat16, device_map=device, **_ABSENT
    )


def _load_with_accelerate(source: str) -> object:
    """Load the pipeline's only model as accelerate's documentation shows, for large models."""
    import torch
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from diffusers import FluxTransformer2DModel

    folder = Path(source, "transformer")
    weights = [*folder.glob("*.safetensors.index.json"), *folder.glob("*.safetensors")]
    with init_empty_weights():
        model = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(folder))
    return load_checkpoint_and_dispatch(
        model, str(weights[0]), device_map={"": _DEVICE}, dtype=torch.bfloat16
    )


def _note_bounds() -> list[int]:
    """Return a list that gets what slots take, and how much may be decoded ahead, in bytes."""
    from shmload._decoding.allowance import Allowance
    from shmload._devices.upload import PageLocked

    sizes: list[int] = []
    for made in (Allowance, PageLocked):
        make = made.__init__

        def noted(self: Any, nbytes: int, *args: Any, make: Any = make) -> None:
            sizes.append(nbytes)
            make(self, nbytes, *args)

        made.__init__ = noted  # type: ignore[method-assign]
    return sizes


# Copies -------------------------------------------------------------------------------------------


def uploads(small: str, source: str) -> Numbers:
    """Load a resident pipeline to the GPU; time only the copy.

    Returns:
        Bytes per second: `pinned` and `pageable` for plain copies; `load_pipeline` for the copy
        inside it, with its allocations on the GPU; `to_device` for that whole call.
    """
    _begin()
    import torch

    import shmload
    from shmload._loading.trace import Phase, tracing

    def load_pipeline(source: str, **kwargs: Any) -> Any:
        return shmload.load_pipeline(source, dtype=torch.bfloat16, **kwargs, **_ABSENT)

    load_pipeline(small, device_map="cuda")
    found = {"pinned": _copy_rate(is_pinned=True), "pageable": _copy_rate(is_pinned=False)}
    module = load_pipeline(source, keep=True).transformer
    nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    found["to_device"] = nbytes / _time(partial(shmload.to_device, module, "cuda"))
    del module
    _tidy_up()
    with tracing(None, source) as trace:
        _time(partial(load_pipeline, source, device_map="cuda"))
    found["load_pipeline"] = nbytes / trace.times_s()[Phase.COPY]
    return found


def _copy_rate(*, is_pinned: bool) -> float:
    """Copy host memory to the device; return bytes per second."""
    import torch

    source = torch.empty(
        _FLOOR_NBYTES, dtype=torch.uint8, pin_memory=is_pinned and not _IS_PRETENDED
    ).fill_(1)
    target = torch.empty_like(source, device=_DEVICE)

    def copy() -> None:
        for _ in range(_FLOOR_COPIES):
            target.copy_(source, non_blocking=True)

    target.copy_(source)
    return _FLOOR_COPIES * _FLOOR_NBYTES / _time(copy)


def small_tensors(count: int) -> Numbers:
    """Move `count` tensors of 1 KiB: `first_s` and `call_s` of two calls, `torch_s` of torch's."""
    _begin()
    import torch

    import shmload

    def make() -> torch.nn.Module:
        norm = partial(torch.nn.LayerNorm, _VECTOR_LENGTH, dtype=torch.bfloat16)  # two tensors each
        return torch.nn.ModuleList(norm() for _ in range(count // 2))

    make().to(_DEVICE)
    return {
        "first_s": _time(partial(shmload.to_device, make(), "cuda")),
        "call_s": _time(partial(shmload.to_device, make(), "cuda")),
        "torch_s": _time(partial(make().to, _DEVICE)),
    }


# Other loaders ------------------------------------------------------------------------------------
# Each is called as its documentation shows, and returns what keeps its tensors alive.


def _safetensors(paths: list[str], device: str) -> object:
    from safetensors.torch import load_file

    return [load_file(path, device=device) for path in paths]


def _fastsafetensors(paths: list[str], device: str) -> object:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: paths})
    buffers = loader.copy_files_to_device()
    # The tensors are views of the loader's memory, so return the loader too.
    return loader, buffers, [buffers.get_tensor(name) for name in buffers.key_to_rank_lidx]


def _runai(paths: list[str], device: str) -> object:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        return [tensor.to(device) for _, tensor in streamer.get_tensors()]


def _instanttensor(paths: list[str], device: str) -> object:
    from instanttensor import safe_open  # type: ignore[import-not-found]

    with safe_open(paths, framework="pt", device=device) as file:
        return [tensor for _, tensor in file.tensors()]  # since 0.2 each tensor owns its memory


_LOADERS: dict[str, Callable[[list[str], str], object]] = {
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "runai-model-streamer": _runai,
    "instanttensor": _instanttensor,
}
"""Loaders by package name."""

FOR_CACHED_FILES: dict[str, dict[str, str]] = {
    "fastsafetensors": {"FASTSAFETENSORS_ODIRECT": "0"},
    "runai-model-streamer": {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
    "instanttensor": {"INSTANTTENSOR_BACKEND": "BUFFERED"},
}
"""Environment variables, by package name, that make a loader read through the page cache."""


def peers() -> dict[str, str | None]:
    """Return the versions of other loaders; None for a loader that is not installed."""
    return {
        name: metadata.version(name) if importlib.util.find_spec(name.replace("-", "_")) else None
        for name in _LOADERS
    }


def peer(name: str, small: str, *paths: str) -> Numbers:
    """Load all tensors of some files to the GPU with another loader; return `call_s`."""
    _begin()
    _LOADERS[name]([small], _DEVICE)
    _tidy_up()
    return {"call_s": _time(partial(_LOADERS[name], list(paths), _DEVICE))}
