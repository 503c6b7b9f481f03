"""Loads to a GPU: the figures of `scripts/bench gpu`; `gpu_probes` is what the processes run."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from benchmarks import gpu_probes
from benchmarks.bench import Bench, ProbeFailed, Suite, Way, weight_files, weights_nbytes
from benchmarks.figures import Figure, Rounds, Sample, better, labelled, speed_up
from benchmarks.load import PARALLEL

_WORKERS = "4"
_HOST_LIMIT = "256MiB"
_TENSORS = 2_000
_DIFFUSERS = ("diffusers, sequential", "diffusers, parallel")
# Sizes in bfloat16, in GB: a double block, a single block, all other weights.
_DOUBLE_GB, _SINGLE_GB, _REST_GB = 0.680, 0.283, 0.129


def describe_gpu(bench: Bench) -> dict[str, str]:
    """Return facts about the GPU, the model and other loaders; empty without a GPU."""
    gpu: dict[str, str] = bench.ask(gpu_probes.describe)
    if gpu:
        versions = bench.ask(gpu_probes.peers)
        gpu["peers"] = ", ".join(f"{n} {v or 'not installed'}" for n, v in versions.items())
        blocks = f"{bench.blocks} double and {bench.blocks * 3 // 2} single blocks"
        gpu["weights"] = f"FluxTransformer2DModel with {blocks}"
    return gpu


def measure_upload(bench: Bench) -> list[Figure]:
    """Copy resident segments to the GPU, against a plain copy from pinned memory."""
    source = _bf16(bench)
    run = bench.probe(gpu_probes.uploads, bench.source("flux-small"), source)
    rounds = bench.measure({"uploads": partial(bench.while_resident, source, run)})
    bench.evict()
    labels = {
        "load_pipeline, its copy": "load_pipeline",
        "to_device, the whole call": "to_device",
        "plain copy, pinned": "pinned",
        "plain copy, pageable": "pageable",
    }
    rates = {
        label: rounds.sample("uploads", name).scaled(1e-9, "GB/s") for label, name in labels.items()
    }
    ours = rates["load_pipeline, its copy"]
    what = f"weights in memory ({_size(source)}) to the GPU: throughput"
    share = Figure(
        name="upload",
        what=f"{what}, against a pinned copy",
        sample=(ours / rates["plain copy, pinned"]).scaled(100, "%"),
        at_least=90,
        beside=rates,
    )
    if "H200" not in bench.ask(gpu_probes.describe).get("GPU", ""):
        return [share]
    return [share, Figure(name="upload-rate", what=what, sample=ours, at_least=48.5)]


def measure_call(bench: Bench) -> list[Figure]:
    """`load_pipeline` with weights in memory, against diffusers."""
    source = _bf16(bench)
    ours = partial(bench.while_resident, source, _load(bench, "shmload", source))
    rounds = bench.measure({"shmload": ours} | _others(bench, source), source)
    bench.evict()
    return [_against_diffusers("call", "load with weights in memory, bfloat16", 5, rounds, source)]


def measure_convert(bench: Bench) -> list[Figure]:
    """float32 files to bfloat16 on the GPU: the time, and the host memory it takes."""
    source = bench.source(f"flux-{bench.blocks}-fp32")
    ways = {
        "shmload": _load(bench, "shmload", source, SHMLOAD_WORKERS=_WORKERS),
        # One worker per core: four workers do not fill a ring of this size.
        _HOST_LIMIT: _load(bench, "shmload", source, _HOST_LIMIT),
    }
    rounds = bench.measure(ways | _others(bench, source), source)
    what = f"float32 files to bfloat16, {_WORKERS} workers"
    return [
        _against_diffusers("convert", what, 3, rounds, source),
        _host_memory("memory", f"{_WORKERS} workers", rounds, "shmload"),
        _host_memory("memory-limited", f"max_host_memory={_HOST_LIMIT}", rounds, _HOST_LIMIT),
    ]


def _host_memory(name: str, how: str, rounds: Rounds, way: str) -> Figure:
    bound = rounds.sample(way, "bound_nbytes")
    return Figure(
        name=name,
        what=f"the same, {how}: host memory besides what may be decoded ahead",
        sample=rounds.sample(way, "host_nbytes") - bound,
        at_most=200,
        beside={"ahead": bound, "the call": rounds.sample(way, "call_s")},
    )


def measure_tensors(bench: Bench) -> list[Figure]:
    """The time per tensor, with tensors too small for their bytes to matter."""
    rounds = bench.measure({"tensors": bench.probe(gpu_probes.small_tensors, _TENSORS)})
    call, first, torch = (
        rounds.sample("tensors", name).scaled(1e3, "ms")
        for name in ("call_s", "first_s", "torch_s")
    )
    return [
        Figure(
            name="tensors",
            what=f"to_device of {_TENSORS:,} tensors of 1 KiB, second call",
            sample=call,
            at_most=20,
            beside={"first call": first, "Module.to": torch},
        )
    ]


def measure_peers(bench: Bench) -> list[Figure]:
    """Other loaders of the same files, with no weights in memory."""
    source = _bf16(bench)
    files = [*weight_files(bench.source("flux-small")), *weight_files(source)]
    ways: dict[str, Way] = {"shmload": _load(bench, "shmload", source)}
    for name, version in bench.ask(gpu_probes.peers).items():
        if version is None:
            continue
        way = bench.probe(
            gpu_probes.peer, name, *files, **gpu_probes.FOR_CACHED_FILES.get(name, {})
        )
        try:
            way()
        except ProbeFailed as exc:
            bench.announce(f"{name} {version} does not run here: {str(exc).splitlines()[-1]}")
        else:
            ways[f"{name} {version}"] = way
    calls = bench.measure(ways, source).samples("call_s")
    ours = calls.pop("shmload")
    return [
        Figure(
            name=f"peer-{way.partition(' ')[0]}",
            what=f"bfloat16 files ({_size(source)}) to the GPU: speed-up over {way}",
            sample=theirs / ours,
            at_least=1,
            beside=_rates(source, {"shmload": ours, way: theirs}),
        )
        for way, theirs in calls.items()
    ]


def _bf16(bench: Bench) -> Path:
    return bench.source(f"flux-{bench.blocks}-bf16")


def _load(bench: Bench, way: str, source: Path, *arguments: object, **variables: str) -> Way:
    small = bench.source("flux-small")
    return bench.probe(gpu_probes.load, way, small, source, *arguments, **variables)


def _others(bench: Bench, source: Path) -> dict[str, Way]:
    """Return the libraries' ways to load the pipeline; its one model for accelerate."""
    sequential, parallel = _DIFFUSERS
    return {
        sequential: _load(bench, "diffusers", source),
        parallel: _load(bench, "diffusers", source, **PARALLEL),
        "accelerate": _load(bench, "accelerate", source),
    }


def _against_diffusers(name: str, what: str, limit: float, rounds: Rounds, source: Path) -> Figure:
    """Compare with the faster of diffusers' two ways."""
    calls = rounds.samples("call_s")
    calls.pop(_HOST_LIMIT, None)
    best = better(calls, _DIFFUSERS)
    rates = _rates(source, {way: calls[way] for way in ("shmload", best)})
    return speed_up(
        name,
        f"{what}: speed-up over from_pretrained",
        calls,
        over=best,
        at_least=limit,
        beside=labelled("{}, of the files", rates),
    )


def _rates(source: Path, calls: Mapping[str, Sample]) -> dict[str, Sample]:
    gb = weights_nbytes(weight_files(source)) / 1e9
    return {
        way: Sample(tuple(gb / elapsed_s for elapsed_s in sample.values), "GB/s")
        for way, sample in calls.items()
    }


def _size(source: Path) -> str:
    return f"{weights_nbytes(weight_files(source)) / 1e9:.1f} GB"


def suite(blocks: int, only: Collection[str] = ()) -> Suite:
    """Return the suite for a transformer of this size.

    Args:
        blocks: double blocks; there are 1.5 times as many single ones.
        only: names of its measurements that are wanted; none for all.
    """
    gb = _REST_GB + blocks * _DOUBLE_GB + blocks * 3 // 2 * _SINGLE_GB
    # float32 has twice the bytes, and one measurement wants it.
    converts = not only or "convert" in only
    return Suite(
        measures={
            "upload": measure_upload,
            "call": measure_call,
            "convert": measure_convert,
            "tensors": measure_tensors,
            "peers": measure_peers,
        },
        sources=(
            "flux-small",
            *((f"flux-{blocks}-fp32",) if converts else ()),
            f"flux-{blocks}-bf16",
        ),
        disk_gb=(3.1 if converts else 1.1) * gb,
        shm_gb=1.1 * gb + 1,  # and rings
        memory_gb=(5 if converts else 3) * gb + 4,
    )
