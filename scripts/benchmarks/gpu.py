"""Loads to a GPU: the figures of `scripts/bench gpu`; `gpu_probes` is what the processes run."""

from benchmarks import gpu_probes
from benchmarks.bench import Bench, Suite, weights_nbytes
from benchmarks.figures import Figure, speed_up
from benchmarks.load import PARALLEL

_WORKERS = "4"
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
    source, what = "flux-8-bf16", "load with weights in memory, bfloat16"
    bench.warm(bench.source(source))
    return [_against_diffusers(bench, "call", what, 5, source)]


def measure_convert(bench: Bench) -> list[Figure]:
    """float32 files to bfloat16 on the GPU."""
    what = f"float32 files to bfloat16, {_WORKERS} workers"
    return [_against_diffusers(bench, "convert", what, 3, "flux-8-fp32", SHMLOAD_WORKERS=_WORKERS)]


def _against_diffusers(
    bench: Bench, name: str, what: str, limit: float, source: str, **variables: str
) -> Figure:
    """Measure a load by shmload, which gets the variables, and by diffusers."""
    given = bench.source("flux-small"), bench.source(source)
    ways = {
        "shmload": bench.probe(gpu_probes.load, "shmload", *given, **variables),
        _DIFFUSERS[0]: bench.probe(gpu_probes.load, "diffusers", *given),
        _DIFFUSERS[1]: bench.probe(gpu_probes.load, "diffusers", *given, **PARALLEL),
    }
    took = bench.measure(ways, bench.source(source)).samples("call_s")
    what = f"{what}: speed-up over from_pretrained"
    return speed_up(name, what, took, over=_DIFFUSERS, at_least=limit)


SUITE = Suite(
    measures={"upload": measure_upload, "call": measure_call, "convert": measure_convert},
    sources=("flux-small", "flux-8-fp32", "flux-8-bf16"),
    disk_gb=28,
    shm_gb=11,  # the weights, and rings
    memory_gb=49,
)
