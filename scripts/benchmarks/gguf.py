"""GGUF files: their figures in `scripts/bench formats`.

Each process loads a small model first, so that no clock counts an import.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import shmload
from benchmarks.attach import attach, load_gguf, touched
from benchmarks.bench import Bench, Way
from benchmarks.figures import Figure, Rounds, labelled, speed_up
from benchmarks.probes import (
    Clients,
    Numbers,
    command_of,
    pss_nbytes,
    tell,
    touch,
    used_cpu_s,
)

_PROCESSES = 4
_WORKERS = 2


def measure_gguf(bench: Bench) -> list[Figure]:
    """A part of a transformer in Q4_K: an attach, and the memory of several processes."""
    source = bench.source("flux-gguf")
    file_mb = (source / "model.gguf").stat().st_size / 1e6
    memory = _measure(bench, partial(bench.probe, together), source).samples("pss_nbytes")
    copies = {way: sample.scaled(1 / file_mb, "") for way, sample in memory.items()}
    return [
        _attach_figure(bench, "gguf-attach", "GGUF Q4_K, 0.7 GB", source),
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
    source = bench.source("flux-gguf-whole")
    return [_attach_figure(bench, "gguf-attach-whole", "GGUF Q4_K, 6.8 GB", source)]


def _attach_figure(bench: Bench, name: str, what: str, source: Path) -> Figure:
    rounds = _measure(bench, partial(bench.probe, attach, "gguf"), source)
    return speed_up(
        name,
        f"{what}, with its blocks in memory: speed-up over from_single_file",
        rounds.samples("call_s"),
        at_least=10,
        beside=labelled("{}, call and touch of every page", touched(rounds)),
    )


def _measure(bench: Bench, probe: Callable[[str, Path, Path], Way], source: Path) -> Rounds:
    """Run a function for a file whose blocks are in shared memory, by shmload and diffusers."""
    small = bench.source("flux-gguf-small")
    for each in (source, small):
        shmload.warm(each / "model.gguf")
    rounds = bench.measure(
        {way: probe(way, small, source) for way in ("shmload", "diffusers")}, source
    )
    bench.evict()
    return rounds


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
    return [
        speed_up(
            "gguf-floats",
            f"GGUF Q4_K to bf16 by {_WORKERS} workers: speed-up over one core of the package",
            rounds.samples("call_s"),
            over="package",
            at_least=1.8,
            beside=labelled("{}, processor time", rounds.samples("cpu_s"))
            | {"package, without the cast": rounds.sample("package", "dequantise_s")},
        )
    ]


# What runs in fresh processes ---------------------------------------------------------------------


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
    load, models = load_gguf(way), []
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
    cpu_before = used_cpu_s()
    began = time.perf_counter()
    dequantise_s = 0.0
    kept = []
    for tensor in gguf.GGUFReader(path).tensors:
        first = time.perf_counter()
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        dequantise_s += time.perf_counter() - first
        kept.append(torch.from_numpy(values).to(torch.bfloat16))
    call_s = time.perf_counter() - began
    return {"call_s": call_s, "dequantise_s": dequantise_s, "cpu_s": used_cpu_s() - cpu_before}


def workers(small: str, path: str, count: int) -> Numbers:
    """Dequantise a file to bfloat16 by workers.

    Returns:
        `call_s`, with their start, and `cpu_s` of all.
    """
    shmload.warm(small, dtype="bfloat16")
    cpu_before = used_cpu_s()
    began = time.perf_counter()
    shmload.warm(path, dtype="bfloat16", workers=count)
    call_s = time.perf_counter() - began
    cpu_s = used_cpu_s() - cpu_before
    shmload.evict(path)
    shmload.evict(small)
    return {"call_s": call_s, "cpu_s": cpu_s}
