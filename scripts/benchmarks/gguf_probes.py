"""Probes of GGUF files, a fresh process each: `python gguf_probes.py NAME ARGUMENTS`.

Prints one line of JSON. Each loads a small model first, so that no clock counts an import.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PAGE_NBYTES = 4096
_CLASS = "FluxTransformer2DModel"

Numbers = dict[str, float]


def attach(way: str, small: str, source: str) -> Numbers:
    """Load a quantised model.

    Returns:
        `call_s` of the call; `touch_s` of reading a byte of each page of each weight after it.
    """
    load = _loader(way)
    load(small)
    gc.collect()
    began = time.perf_counter()
    model = load(source)
    called = time.perf_counter()
    _touch(model)
    return {"call_s": called - began, "touch_s": time.perf_counter() - called}


def together(way: str, small: str, source: str, count: int) -> Numbers:
    """Load a quantised model in `count` processes; each then reads all weights.

    Returns:
        `pss_nbytes`, what they have more of when they have the model, all together.
    """
    command = [sys.executable, "-P", __file__, "stay", json.dumps([way, small, source])]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        # What they share must be there once in both numbers, so all go step by step.
        before = _ask_all(processes)
        return {"pss_nbytes": _ask_all(processes) - before}
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _ask_all(processes: list["subprocess.Popen[bytes]"]) -> int:
    """Let processes take a step; return their memory afterwards."""
    for process in processes:
        assert process.stdin
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout
        while process.stdout.readline().strip() != b"DONE":
            if process.poll() is not None:
                raise RuntimeError("a process ended early")
    return sum(_pss_nbytes(process.pid) for process in processes)


def stay(way: str, small: str, source: str) -> Numbers:
    """Be one of the processes of `together`."""
    load, models = _loader(way), []
    for path in (small, source):
        sys.stdin.readline()
        models.append(load(path))
        _touch(models[-1])
        gc.collect()
        print("DONE", flush=True)
    sys.stdin.readline()
    return {}


def package(path: str) -> Numbers:
    """Dequantise a file on one core by the package, tensor by tensor, and cast it to bfloat16.

    Returns:
        `call_s`, `dequantise_s` without the cast, and `cpu_s` of the process.
    """
    import gguf
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cpu_before = _cpu_s()
    began = time.perf_counter()
    dequantise_s = 0.0
    kept = []
    for tensor in gguf.GGUFReader(path).tensors:
        first = time.perf_counter()
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        dequantise_s += time.perf_counter() - first
        kept.append(torch.from_numpy(values).to(torch.bfloat16))
    call_s = time.perf_counter() - began
    return {"call_s": call_s, "dequantise_s": dequantise_s, "cpu_s": _cpu_s() - cpu_before}


def workers(small: str, path: str, count: int) -> Numbers:
    """Dequantise a file to bfloat16 by workers.

    Returns:
        `call_s`, with their start, and `cpu_s` of all.
    """
    import shmload

    shmload.warm(os.path.join(small, "model.gguf"), dtype="bfloat16")
    cpu_before = _cpu_s()
    began = time.perf_counter()
    shmload.warm(path, dtype="bfloat16", workers=count)
    call_s = time.perf_counter() - began
    cpu_s = _cpu_s() - cpu_before
    shmload.evict(path)
    shmload.evict(os.path.join(small, "model.gguf"))
    return {"call_s": call_s, "cpu_s": cpu_s}


def _cpu_s() -> float:
    """Return what this process has used, and its children that have ended, in seconds."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _loader(way: str) -> Callable[[str], Any]:
    import torch
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    import shmload

    def load(source: str) -> Any:
        path, config = os.path.join(source, "model.gguf"), os.path.join(source, "config")
        quantised = GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
        given: dict[str, Any] = {"config": config, "quantization_config": quantised}
        if way == "shmload":
            return shmload.load_model(_CLASS, path, dtype=torch.bfloat16, keep=True, **given)
        return FluxTransformer2DModel.from_single_file(path, torch_dtype=torch.bfloat16, **given)

    return load


def _touch(model: Any) -> None:
    import torch

    with torch._C.DisableTorchFunctionSubclass():  # diffusers' parameters refuse a sum
        for tensor in model.parameters():
            tensor.data.view(torch.uint8).reshape(-1)[::_PAGE_NBYTES].sum()


def _pss_nbytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


_PROBES: dict[str, Callable[..., Numbers]] = {
    probe.__name__: probe for probe in (attach, together, stay, package, workers)
}

if __name__ == "__main__":
    print("\n" + json.dumps(_PROBES[sys.argv[1]](*json.loads(sys.argv[2]))))
