"""GGUF files: their figures in `scripts/bench formats`."""

from functools import partial
from pathlib import Path

import shmload
from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.samples import Rounds

_PROBES = Path(__file__).with_name("gguf_probes.py")
_PROCESSES = 4
_WORKERS = 2
_WAYS = "shmload", "diffusers"


def measure_gguf(bench: Bench) -> list[Figure]:
    """A part of a transformer in Q4_K: an attach, and the memory of several processes."""
    source = bench.sources.gguf
    weights = (source / "model.gguf").stat().st_size
    rounds = _measure(bench, source, {"attach": (), "together": (_PROCESSES,)})
    pss = {way: rounds.sample(f"{way}, together", "pss_nbytes") for way in _WAYS}
    return [
        _attach_figure("gguf-attach", "GGUF Q4_K, 0.7 GB", rounds),
        Figure(
            name="gguf-memory",
            what=f"GGUF Q4_K: copies of the file that {_PROCESSES} processes have in memory",
            sample=pss["shmload"].scaled(1 / weights),
            unit="",
            target=Target(1.05),
            beside=(Line(label="diffusers", sample=pss["diffusers"].scaled(1 / weights), unit=""),),
        ),
    ]


def measure_gguf_whole(bench: Bench) -> list[Figure]:
    """All of Flux's transformer in Q4_K: an attach."""
    rounds = _measure(bench, bench.sources.gguf_whole, {"attach": ()})
    return [_attach_figure("gguf-attach-whole", "GGUF Q4_K, 6.8 GB", rounds)]


def _measure(bench: Bench, source: Path, probes: dict[str, tuple[int, ...]]) -> Rounds:
    """Run probes of a file whose blocks are in shared memory, by their names and arguments."""
    small = bench.sources.gguf_small
    processes = bench.processes.of(_PROBES)
    for each in (source, small):
        shmload.warm(each / "model.gguf")
    ways = {
        f"{way}, {name}": partial(processes.probe, name, way, small, source, *arguments)
        for name, arguments in probes.items()
        for way in _WAYS
    }
    rounds = bench.measure(ways, source)
    bench.evict()
    return rounds


def _attach_figure(name: str, what: str, rounds: Rounds) -> Figure:
    calls = {way: rounds.sample(f"{way}, attach", "call_s") for way in _WAYS}
    touched = {way: calls[way] + rounds.sample(f"{way}, attach", "touch_s") for way in _WAYS}
    return Figure(
        name=name,
        what=f"{what}, with its blocks in memory: speed-up over from_single_file",
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
    )


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
