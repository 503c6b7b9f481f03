"""Other formats than directories of safetensors: the figures of `scripts/bench formats`."""

from pathlib import Path

from benchmarks.bench import Bench, Suite
from benchmarks.bucket import measure_bucket
from benchmarks.figures import Figure, labelled
from benchmarks.gguf import measure_gguf, measure_gguf_floats, measure_gguf_whole
from benchmarks.load import attach_rounds, whole_process
from benchmarks.probes import attach


def measure_bin(bench: Bench) -> list[Figure]:
    """`.bin` in float32, wanted in bfloat16: the first load, and an attach."""
    source = bench.source("sd15-fp32-bin")
    what = ".bin fp32 to bf16"
    return [
        _first_load(bench, source, "bin-first", what, at_least=1.25),
        _attach(bench, source, "bin-attach", f"{what} with weights in memory", at_least=15),
    ]


def measure_bin_same_dtype(bench: Bench) -> list[Figure]:
    """`.bin` in the wanted dtype, where there is nothing to convert."""
    source = bench.source("sd15-bf16-bin")
    what = ".bin without a cast (bf16)"
    return [_first_load(bench, source, "bin-same-dtype", what, at_least=0.97)]


def measure_single_file(bench: Bench) -> list[Figure]:
    """One file of SDXL's classes in float16, wanted in bfloat16: an attach."""
    source = bench.source("sdxl-fp16-file")
    what = "one file fp16 to bf16 with weights in memory"
    file = source / "model.safetensors"
    return [_attach(bench, source, "single-file-attach", what, at_least=5, file=file)]


def _first_load(bench: Bench, source: Path, name: str, what: str, *, at_least: float) -> Figure:
    wall = whole_process(bench, source).samples("wall_s")
    return Figure(
        name=name,
        what=f"{what}, nothing in memory: whole process, speed-up over from_pretrained",
        sample=wall["diffusers"] / wall["shmload"],
        at_least=at_least,
        beside=wall,
    )


def _attach(
    bench: Bench, source: Path, name: str, what: str, *, at_least: float, file: Path | None = None
) -> Figure:
    theirs = bench.probe(attach, "diffusers", bench.source("small-fp32"), source)
    rounds = attach_rounds(bench, source, {"diffusers": theirs}, file)
    calls = rounds.samples("call_s")
    return Figure(
        name=name,
        what=f"{what}: speed-up over {'from_single_file' if file else 'from_pretrained'}",
        sample=calls["diffusers"] / calls["shmload"],
        at_least=at_least,
        beside=calls | labelled("{}, private memory", rounds.samples("private_nbytes")),
    )


SUITE = Suite(
    measures={
        "bin": measure_bin,
        "bin-same-dtype": measure_bin_same_dtype,
        "single-file": measure_single_file,
        "gguf": measure_gguf,
        "gguf-whole": measure_gguf_whole,
        "gguf-floats": measure_gguf_floats,
        "bucket": measure_bucket,
    },
    sources=(
        "small-fp32",
        "sd15-fp32",
        "sd15-bf16",
        "sd15-fp32-bin",
        "sd15-bf16-bin",
        "sdxl-fp16-file",
        "flux-gguf",
        "flux-gguf-whole",
        "flux-gguf-small",
    ),
    disk_gb=30,
    shm_gb=8,
    memory_gb=22,
)
