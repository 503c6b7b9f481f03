"""GGUF files: their figures in `scripts/bench formats`.

Each process loads a small model first, so that no clock counts an import.
"""

import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shmload
from benchmarks.bench import Bench
from benchmarks.figures import Figure, Rounds, labelled
from benchmarks.probes import Clients, Numbers, command_of, pss_nbytes, tell, touch

_PROCESSES = 4
_WORKERS = 2


def measure_gguf(bench: Bench) -> list[Figure]:
    """A part of a transformer in Q4_K: an attach, and the memory of several processes."""
    source = bench.source("flux-gguf")
    file_mb = (source / "model.gguf").stat().st_size / 1e6
    memory = _measure(bench, together, source).samples("pss_nbytes")
    copies = {way: sample.scaled(1 / file_mb, "") for way, sample in memory.items()}
    return [
        _attach_figure("gguf-attach", "GGUF Q4_K, 0.7 GB", _measure(bench, attach, source)),
        Figure(
            name="gguf-memory",
            what=f"GGUF Q4_K: copies of the file that {_PROCESSES} processes have in memory",
            sample=copies["shmload"],
            at_most=1.05,
            beside={"diffusers": copies["diffusers"]},
        ),
    ]


def measure_gguf_whole(bench: Bench) -> list[Figure]:
    """All of Flux's transformer in Q4_K: an attach."""
    rounds = _measure(bench, attach, bench.source("flux-gguf-whole"))
    return [_attach_figure("gguf-attach-whole", "GGUF Q4_K, 6.8 GB", rounds)]


def _measure(bench: Bench, function: Callable[..., Numbers], source: Path) -> Rounds:
    """Run a function for a file whose blocks are in shared memory, by shmload and diffusers."""
    small = bench.source("flux-gguf-small")
    for each in (source, small):
        shmload.warm(each / "model.gguf")
    ways = {way: bench.probe(function, way, small, source) for way in ("shmload", "diffusers")}
    rounds = bench.measure(ways, source)
    bench.evict()
    return rounds


def _attach_figure(name: str, what: str, rounds: Rounds) -> Figure:
    calls = rounds.samples("call_s")
    touched = {way: calls[way] + rounds.sample(way, "touch_s") for way in calls}
    return Figure(
        name=name,
        what=f"{what}, with its blocks in memory: speed-up over from_single_file",
        sample=calls["diffusers"] / calls["shmload"],
        at_least=10,
        beside=calls | labelled("{}, call and touch of every page", touched),
    )


def measure_gguf_floats(bench: Bench) -> list[Figure]:
    """A transformer in Q4_K, wanted in bfloat16."""
    path = bench.source("flux-gguf") / "model.gguf"
    small = bench.source("flux-gguf-small") / "model.gguf"
    rounds = bench.measure(
        {
            "package": bench.probe(package, path),
            "shmload": bench.probe(workers, small, path, _WORKERS),
            "shmload, one worker": bench.probe(workers, small, path, 1),
        },
        path.parent,
    )
    calls = rounds.samples("call_s")
    return [
        Figure(
            name="gguf-floats",
            what=f"GGUF Q4_K to bf16 by {_WORKERS} workers: speed-up over one core of the package",
            sample=calls["package"] / calls["shmload"],
            at_least=1.8,
            beside=calls
            | labelled("{}, processor time", rounds.samples("cpu_s"))
            | {"package, without the cast": rounds.sample("package", "dequantise_s")},
        )
    ]


# What runs in fresh processes ---------------------------------------------------------------------


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
    touch([model])
    return {"call_s": called - began, "touch_s": time.perf_counter() - called}


def together(way: str, small: str, source: str) -> Numbers:
    """Load a quantised model in some processes; each then reads all weights.

    Returns:
        `pss_nbytes`, what they have more of when they have the model, all together.
    """
    with Clients(command_of(stay, way, small, source), _PROCESSES) as clients:
        # What they share must be there once in both numbers, so all go step by step.
        clients.hear()
        before = pss_nbytes(clients.pids)
        clients.ask()
        return {"pss_nbytes": pss_nbytes(clients.pids) - before}


def stay(way: str, small: str, source: str) -> None:
    """Be one of the processes of `together`."""
    load, models = _loader(way), []
    for path in (small, source):
        models.append(load(path))
        touch(models[-1:])
        gc.collect()
        tell()
        sys.stdin.readline()


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
    shmload.warm(small, dtype="bfloat16")
    cpu_before = _cpu_s()
    began = time.perf_counter()
    shmload.warm(path, dtype="bfloat16", workers=count)
    call_s = time.perf_counter() - began
    cpu_s = _cpu_s() - cpu_before
    shmload.evict(path)
    shmload.evict(small)
    return {"call_s": call_s, "cpu_s": cpu_s}


def _cpu_s() -> float:
    """Return what this process has used, and its children that have ended, in seconds."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _loader(way: str) -> Callable[[str], Any]:
    import torch
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    def load(source: str) -> Any:
        path, config = os.path.join(source, "model.gguf"), os.path.join(source, "config")
        quantised = GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
        given: dict[str, Any] = {"config": config, "quantization_config": quantised}
        if way == "shmload":
            model_class = "FluxTransformer2DModel"
            return shmload.load_model(model_class, path, dtype=torch.bfloat16, keep=True, **given)
        return FluxTransformer2DModel.from_single_file(path, torch_dtype=torch.bfloat16, **given)

    return load
