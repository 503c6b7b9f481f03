"""Other formats than directories of safetensors: the figures of `scripts/bench formats`."""

from functools import partial
from typing import Any

from benchmarks.bench import Bench, Suite
from benchmarks.figures import Figure, speed_up
from benchmarks.load import whole_process

_WAYS = ("shmload", "diffusers")


def measure_bin(bench: Bench) -> list[Figure]:
    """`.bin` in float32, wanted in bfloat16: the first load, and an attach."""
    what = ".bin fp32 to bf16, nothing in memory: whole process, speed-up over from_pretrained"
    wall = whole_process(bench, bench.source("sd15-fp32-bin")).samples("wall_s")
    return [
        speed_up("bin-first", what, wall, at_least=1.25),
        _attach(bench, ".bin fp32 to bf16", "pipeline", "small-fp32", "sd15-fp32-bin", at_least=15),
    ]


def measure_single_file(bench: Bench) -> list[Figure]:
    """One file in float32, wanted in bfloat16."""
    names = "small-file", "sd15-fp32-file"
    return [_attach(bench, "one file fp32 to bf16", "file", *names, at_least=5)]


def measure_gguf(bench: Bench) -> list[Figure]:
    """All of Flux's transformer in Q4_K."""
    names = "flux-gguf-small", "flux-gguf"
    return [_attach(bench, "GGUF Q4_K, 6.8 GB", "gguf", *names, at_least=10)]


def _attach(bench: Bench, what: str, kind: str, small: str, name: str, **limit: Any) -> Figure:
    source = bench.source(name)
    load = partial(bench.load, kind, small=bench.source(small), source=source)
    rounds = bench.measure({way: load(way) for way in _WAYS}, source)
    private = rounds.samples("private_nbytes").items()
    return speed_up(
        f"{name}-attach",
        f"{what} with weights in memory: speed-up over the library",
        rounds.samples("call_s"),
        beside={f"{way}, private memory": sample for way, sample in private},
        **limit,
    )


SUITE = Suite(
    measures={
        "bin": measure_bin,
        "single-file": measure_single_file,
        "gguf": measure_gguf,
    },
    sources=(
        "small-fp32",
        "sd15-fp32",
        "sd15-fp32-bin",
        "small-file",
        "sd15-fp32-file",
        "flux-gguf-small",
        "flux-gguf",
    ),
    disk_gb=26,
    shm_gb=8,
    memory_gb=22,
)
