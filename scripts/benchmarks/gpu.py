"""Loads to a GPU: the figures of `scripts/bench gpu`; `gpu_probes` is what the processes run."""

from functools import partial

from benchmarks import gpu_probes
from benchmarks.bench import Bench, Suite, weights_nbytes
from benchmarks.figures import Figure, Rounds, Way, speed_up
from benchmarks.load import PARALLEL

_WORKERS = "4"
_HOST_LIMIT_MIB = 256
_LIMITED = f"shmload, max_host_memory={_HOST_LIMIT_MIB}MiB"
_DIFFUSERS = ("diffusers, sequential", "diffusers, parallel")


def measure_upload(bench: Bench) -> list[Figure]:
    """Copy resident segments to the GPU, against a plain copy from pinned memory."""
    source = bench.source("flux-8-bf16")
    bench.warm(source)
    run = bench.probe(gpu_probes.uploads, bench.source("flux-small"), source)
    rates = bench.measure({"": run}, source)
    labels = {
        "load_pipeline, its copy": "load_pipeline_bytes_per_s",
        "to_device, the whole call": "to_device_bytes_per_s",
        "plain copy, pinned": "pinned_bytes_per_s",
        "plain copy, pageable": "pageable_bytes_per_s",
    }
    beside = {label: rates.sample("", name) for label, name in labels.items()}
    ours, _, pinned, _ = beside.values()
    return [
        Figure(
            name="upload",
            what=f"weights in memory ({weights_nbytes(source) / 1e9:.1f} GB) to the GPU: "
            "throughput, against a pinned copy",
            sample=(ours / pinned).scaled(100, "%"),
            at_least=90,
            beside=beside,
        )
    ]


def measure_call(bench: Bench) -> list[Figure]:
    """`load_pipeline` with weights in memory, against diffusers."""
    bench.warm(bench.source("flux-8-bf16"))
    rounds = _rounds(bench, "flux-8-bf16", {"shmload": _load(bench, "shmload", "flux-8-bf16")})
    return [_against_diffusers("call", "load with weights in memory, bfloat16", 5, rounds)]


def measure_convert(bench: Bench) -> list[Figure]:
    """float32 files to bfloat16 on the GPU: the time, and the host memory it takes."""
    name = "flux-8-fp32"
    ours = {
        "shmload": _load(bench, "shmload", name, SHMLOAD_WORKERS=_WORKERS),
        # One worker per core: four workers do not fill a ring of this size.
        _LIMITED: _load(bench, "shmload", name, f"{_HOST_LIMIT_MIB}MiB"),
    }
    rounds = _rounds(bench, name, ours)
    host = rounds.samples("host_nbytes")
    return [
        _against_diffusers("convert", f"float32 files to bfloat16, {_WORKERS} workers", 3, rounds),
        Figure(
            name="memory-limited",
            what=f"{_LIMITED}: host memory",
            sample=host[_LIMITED],
            at_most=_HOST_LIMIT_MIB * 2**20 / 1e6 + 200,
            beside=host,
        ),
    ]


def _load(bench: Bench, way: str, name: str, *arguments: object, **variables: str) -> Way:
    given = way, bench.source("flux-small"), bench.source(name), *arguments
    return bench.probe(gpu_probes.load, *given, **variables)


def _rounds(bench: Bench, name: str, ours: dict[str, Way]) -> Rounds:
    """Measure ways of shmload and those of the libraries."""
    load = partial(_load, bench, name=name)
    ways = ours | {
        _DIFFUSERS[0]: load("diffusers"),
        _DIFFUSERS[1]: load("diffusers", **PARALLEL),
    }
    return bench.measure(ways, bench.source(name))


def _against_diffusers(name: str, what: str, limit: float, rounds: Rounds) -> Figure:
    what = f"{what}: speed-up over from_pretrained"
    return speed_up(name, what, rounds.samples("call_s"), over=_DIFFUSERS, at_least=limit)


SUITE = Suite(
    measures={"upload": measure_upload, "call": measure_call, "convert": measure_convert},
    sources=("flux-small", "flux-8-fp32", "flux-8-bf16"),
    disk_gb=28,
    shm_gb=11,  # the weights, and rings
    memory_gb=49,
)
