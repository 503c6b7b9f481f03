"""Loads to a GPU: the figures of `scripts/bench gpu`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.gpu_peers import FOR_CACHED_FILES
from benchmarks.processes import ProbeFailed, Processes
from benchmarks.samples import Result, Rounds, Sample
from benchmarks.sources import weight_files, weights_nbytes
from shmload._devices.ways import WAYS

_DTYPE = "bfloat16"
_WORKERS = "4"
_HOST_LIMIT = "256MiB"
_TENSORS = 2_000
_ATTEMPTS = 3
_PROBES = Path(__file__).with_name("gpu_probes.py")
_DIFFUSERS = {
    "diffusers, sequential": {},
    "diffusers, parallel": {"HF_ENABLE_PARALLEL_LOADING": "1"},
}
_ACCELERATE = "accelerate"


def describe_gpu(processes: Processes) -> dict[str, str]:
    """Return facts about the GPU and the versions of other loaders; empty without a GPU."""
    ask = processes.of(_PROBES).ask
    gpu: dict[str, str] = ask("describe")
    if gpu:
        gpu["peers"] = ", ".join(f"{n} {v or 'not installed'}" for n, v in ask("peers").items())
    return gpu


def measure_upload(bench: Bench) -> list[Figure]:
    """Copy resident segments to the GPU, against a plain copy from pinned memory."""
    source = bench.sources.flux_bf16
    run = _probe(bench, "uploads", bench.sources.flux_small, source)
    rounds = bench.measure({"uploads": partial(_while_resident, bench, run)})
    bench.evict()

    def rate(name: str) -> Sample:
        return rounds.sample("uploads", name).scaled(1e-9)

    def lines(*labels: tuple[str, str]) -> Iterator[Line]:
        return (Line(label=label, sample=rate(name), unit="GB/s") for label, name in labels)

    what = f"weights in memory ({_size(source)}) to the GPU: throughput"
    share = Figure(
        name="upload",
        what=f"{what}, against a pinned copy",
        sample=(rate("auto") / rate("pinned")).scaled(100),
        unit="%",
        target=Target(90, is_least=True),
        beside=(
            *lines(
                ("load_pipeline, its copy", "auto"),
                *((f"the same, pin={name}", name) for name in WAYS),
                ("to_device, the whole call", "to_device"),
                ("plain copy, pinned", "pinned"),
                ("plain copy, pageable", "pageable"),
            ),
        ),
    )
    if "H200" not in describe_gpu(bench.processes).get("GPU", ""):
        return [share]
    absolute = Figure(
        name="upload-rate",
        what=what,
        sample=rate("auto"),
        unit="GB/s",
        target=Target(48.5, is_least=True),
    )
    return [share, absolute]


def measure_call(bench: Bench) -> list[Figure]:
    """`load_pipeline` with weights in memory, against diffusers."""
    source = bench.sources.flux_bf16
    ours = _load(bench, "shmload", source)
    rounds = bench.measure(
        {"shmload": partial(_while_resident, bench, ours)} | _others(bench, source), source
    )
    bench.evict()
    return [_against_diffusers("call", f"load with weights in memory, {_DTYPE}", 5, rounds, source)]


def measure_convert(bench: Bench) -> list[Figure]:
    """float32 files to bfloat16 on the GPU: the time, and the host memory it takes."""
    source = bench.sources.flux_fp32
    ours = partial(_load, bench, "shmload", source)
    ways = {
        "shmload": ours(SHMLOAD_WORKERS=_WORKERS),
        # One worker per core: four workers do not fill a ring of this size.
        _HOST_LIMIT: ours(_HOST_LIMIT),
    }
    rounds = bench.measure(ways | _others(bench, source), source)
    what = f"float32 files to {_DTYPE}, {_WORKERS} workers"
    return [
        _against_diffusers("convert", what, 3, rounds, source),
        _host_memory("memory", f"{_WORKERS} workers", rounds, "shmload"),
        _host_memory("memory-limited", f"max_host_memory={_HOST_LIMIT}", rounds, _HOST_LIMIT),
    ]


def _host_memory(name: str, how: str, rounds: Rounds, way: str) -> Figure:
    peak = rounds.sample(way, "host_nbytes").scaled(1e-6)
    ring = rounds.sample(way, "ring_nbytes").scaled(1e-6)
    return Figure(
        name=name,
        what=f"the same, {how}: host memory besides the ring",
        sample=peak - ring,
        unit="MB",
        target=Target(200),
        beside=(
            Line(label="ring", sample=ring, unit="MB"),
            Line(label="the call", sample=rounds.sample(way, "call_s"), unit="s"),
        ),
    )


def measure_tensors(bench: Bench) -> list[Figure]:
    """The time per tensor, with tensors too small for their bytes to matter."""
    rounds = bench.measure({"tensors": _probe(bench, "small_tensors", _TENSORS)})
    found = {
        name: rounds.sample("tensors", name).scaled(1e3)
        for name in ("call_s", "first_s", "torch_s")
    }
    return [
        Figure(
            name="tensors",
            what=f"to_device of {_TENSORS:,} tensors of 1 KiB, second call",
            sample=found["call_s"],
            unit="ms",
            target=Target(20),
            beside=(
                Line(label="first call", sample=found["first_s"], unit="ms"),
                Line(label="Module.to", sample=found["torch_s"], unit="ms"),
            ),
        )
    ]


def measure_peers(bench: Bench) -> list[Figure]:
    """Other loaders of the same files, with no weights in memory."""
    source = bench.sources.flux_bf16
    ways = {"shmload": _load(bench, "shmload", source)}
    for name, version in bench.processes.of(_PROBES).ask("peers").items():
        if version is not None:
            way = _peer(bench, name, source)
            try:
                way()
            except ProbeFailed as exc:
                bench.announce(f"{name} {version} does not run here: {str(exc).splitlines()[-1]}")
            else:
                ways[f"{name} {version}"] = way
    rounds = bench.measure(ways, source)
    calls = {way: rounds.sample(way, "call_s") for way in ways}
    rate = Line(label="shmload", sample=_rate(source, calls["shmload"]), unit="GB/s")
    return [
        Figure(
            name=f"peer-{way.partition(' ')[0]}",
            what=f"{_DTYPE} files ({_size(source)}) to the GPU: speed-up over {way}",
            sample=calls[way] / calls["shmload"],
            unit="x",
            target=Target(1, is_least=True),
            beside=(rate, Line(label=way, sample=_rate(source, calls[way]), unit="GB/s")),
        )
        for way in ways
        if way != "shmload"
    ]


GPU_MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "upload": measure_upload,
    "call": measure_call,
    "convert": measure_convert,
    "tensors": measure_tensors,
    "peers": measure_peers,
}
"""Measurements by their name for `--only`, in the order of the table."""


def _probe(bench: Bench, name: str, *arguments: object, **variables: str) -> Callable[[], Result]:
    return partial(bench.processes.of(_PROBES).probe, name, *arguments, **variables)


def _load(
    bench: Bench, way: str, source: Path, *arguments: object, **variables: str
) -> Callable[[], Result]:
    return _probe(bench, "load", way, bench.sources.flux_small, source, *arguments, **variables)


def _others(bench: Bench, source: Path) -> dict[str, Callable[[], Result]]:
    """Return the libraries' ways to load the pipeline; its one model for accelerate."""
    ways = {
        way: _load(bench, "diffusers", source, **variables) for way, variables in _DIFFUSERS.items()
    }
    return ways | {_ACCELERATE: _load(bench, _ACCELERATE, source)}


def _peer(bench: Bench, name: str, source: Path) -> Callable[[], Result]:
    files = [*weight_files(bench.sources.flux_small), *weight_files(source)]
    return _probe(bench, "peer", name, *files, **FOR_CACHED_FILES.get(name, {}))


def _while_resident(bench: Bench, run: Callable[[], Result]) -> Result:
    """Run with resident segments; repeat the run if another program removed them."""
    for _ in range(_ATTEMPTS):
        if not bench.resident():
            bench.processes.probe("warm", bench.sources.flux_bf16, _DTYPE, None)
        before = bench.resident()
        result = run()
        if before and bench.resident() == before:
            return result
        bench.announce("another program removed the segments; once more")
    raise ProbeFailed("another program keeps removing the segments")


def _against_diffusers(name: str, what: str, limit: float, rounds: Rounds, source: Path) -> Figure:
    """Compare with the faster of diffusers' two ways."""
    calls = {way: rounds.sample(way, "call_s") for way in ("shmload", *_DIFFUSERS, _ACCELERATE)}
    best = min(_DIFFUSERS, key=lambda way: calls[way].median)
    return Figure(
        name=name,
        what=f"{what}: speed-up over from_pretrained",
        sample=calls[best] / calls["shmload"],
        unit="x",
        target=Target(limit, is_least=True),
        beside=(
            *(Line(label=way, sample=sample, unit="s") for way, sample in calls.items()),
            *(
                Line(label=f"{way}, of the files", sample=_rate(source, calls[way]), unit="GB/s")
                for way in ("shmload", best)
            ),
        ),
    )


def _rate(source: Path, elapsed_s: Sample) -> Sample:
    nbytes = Sample((float(weights_nbytes(source)),) * len(elapsed_s.values))
    return (nbytes / elapsed_s).scaled(1e-9)


def _size(source: Path) -> str:
    return f"{weights_nbytes(source) / 1e9:.1f} GB"
