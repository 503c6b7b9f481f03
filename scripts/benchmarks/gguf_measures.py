"""GGUF files: their figures in `scripts/bench formats`."""

from functools import partial
from pathlib import Path

import shmload
from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target

_PROBES = Path(__file__).with_name("gguf_probes.py")
_PROCESSES = 4
_WORKERS = 2


def measure_gguf(bench: Bench) -> list[Figure]:
    """A transformer in Q4_K: an attach, and the memory of several processes."""
    small, source = bench.sources.gguf_small, bench.sources.gguf
    processes = bench.processes.of(_PROBES)
    given = small, source
    weights = (source / "model.gguf").stat().st_size
    shmload.warm(source / "model.gguf")
    shmload.warm(small / "model.gguf")
    rounds = bench.measure(
        {
            "shmload": partial(processes.probe, "attach", "shmload", *given),
            "diffusers": partial(processes.probe, "attach", "diffusers", *given),
            "shmload, together": partial(
                processes.probe, "together", "shmload", *given, _PROCESSES
            ),
            "diffusers, together": partial(
                processes.probe, "together", "diffusers", *given, _PROCESSES
            ),
        },
        source,
    )
    bench.evict()
    calls = {way: rounds.sample(way, "call_s") for way in ("shmload", "diffusers")}
    touched = {way: calls[way] + rounds.sample(way, "touch_s") for way in calls}
    pss = {way: rounds.sample(f"{way}, together", "pss_nbytes") for way in calls}
    return [
        Figure(
            name="gguf-attach",
            what="GGUF Q4_K with its blocks in memory: speed-up over from_single_file",
            sample=calls["diffusers"] / calls["shmload"],
            unit="x",
            target=Target(10, is_least=True),
            beside=(
                *(Line(label=way, sample=sample, unit="s") for way, sample in calls.items()),
                *(
                    Line(label=f"{way}, call and touch of every page", sample=sample, unit="s")
                    for way, sample in touched.items()
                ),
            ),
        ),
        Figure(
            name="gguf-memory",
            what=f"GGUF Q4_K: copies of the file that {_PROCESSES} processes have in memory",
            sample=pss["shmload"].scaled(1 / weights),
            unit="",
            target=Target(1.05),
            beside=(Line(label="diffusers", sample=pss["diffusers"].scaled(1 / weights), unit=""),),
        ),
    ]


def measure_gguf_floats(bench: Bench) -> list[Figure]:
    """A transformer in Q4_K, wanted in bfloat16."""
    path = bench.sources.gguf / "model.gguf"
    processes = bench.processes.of(_PROBES)
    small = bench.sources.gguf_small
    rounds = bench.measure(
        {
            "package": partial(processes.probe, "package", path),
            "shmload": partial(processes.probe, "workers", small, path, _WORKERS),
            "shmload, one worker": partial(processes.probe, "workers", small, path, 1),
        },
        bench.sources.gguf,
    )
    calls = {way: rounds.sample(way, "call_s") for way in rounds.results}
    cpu = {way: rounds.sample(way, "cpu_s") for way in rounds.results}
    bare = rounds.sample("package", "dequantise_s")
    return [
        Figure(
            name="gguf-floats",
            what=f"GGUF Q4_K to bf16 by {_WORKERS} workers: speed-up over one core of the package",
            sample=calls["package"] / calls["shmload"],
            unit="x",
            target=Target(1.8, is_least=True),
            beside=(
                *(Line(label=way, sample=sample, unit="s") for way, sample in calls.items()),
                *(
                    Line(label=f"{way}, processor time", sample=sample, unit="s")
                    for way, sample in cpu.items()
                ),
                Line(label="package, without the cast", sample=bare, unit="s"),
            ),
        )
    ]
