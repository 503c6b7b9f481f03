"""Other formats than directories of safetensors: the figures of `scripts/bench formats`."""

from pathlib import Path

from benchmarks.attach import Attach
from benchmarks.bench import Bench, Suite
from benchmarks.figures import Figure, labelled, speed_up
from benchmarks.gguf import measure_gguf, measure_gguf_floats, measure_gguf_whole
from benchmarks.load import whole_process


def measure_bin(bench: Bench) -> list[Figure]:
    """`.bin` in float32, wanted in bfloat16: the first load, and an attach."""
    attach = Attach(bench, bench.source("sd15-fp32-bin"))
    what = ".bin fp32 to bf16"
    return [
        _first_load(bench, attach.source, "bin-first", what, at_least=1.25),
        _attach_figure(
            "bin-attach",
            f"{what} with weights in memory: speed-up over from_pretrained",
            attach,
            at_least=15,
        ),
    ]


def measure_bin_same_dtype(bench: Bench) -> list[Figure]:
    """`.bin` in the wanted dtype, where there is nothing to convert."""
    source = bench.source("sd15-bf16-bin")
    what = ".bin without a cast (bf16)"
    return [_first_load(bench, source, "bin-same-dtype", what, at_least=0.97)]


def measure_single_file(bench: Bench) -> list[Figure]:
    """One file of SDXL's classes in float16, wanted in bfloat16: an attach."""
    source = bench.source("sdxl-fp16-file")
    what = "one file fp16 to bf16 with weights in memory: speed-up over from_single_file"
    attach = Attach(bench, source, resident=source / "model.safetensors")
    return [_attach_figure("single-file-attach", what, attach, at_least=5)]


def _first_load(bench: Bench, source: Path, name: str, what: str, *, at_least: float) -> Figure:
    what = f"{what}, nothing in memory: whole process, speed-up over from_pretrained"
    return speed_up(name, what, whole_process(bench, source).samples("wall_s"), at_least=at_least)


def _attach_figure(name: str, what: str, attach: Attach, *, at_least: float) -> Figure:
    rounds = attach.rounds(diffusers=attach.by("diffusers"))
    private = labelled("{}, private memory", rounds.samples("private_nbytes"))
    return speed_up(name, what, rounds.samples("call_s"), at_least=at_least, beside=private)


SUITE = Suite(
    measures={
        "bin": measure_bin,
        "bin-same-dtype": measure_bin_same_dtype,
        "single-file": measure_single_file,
        "gguf": measure_gguf,
        "gguf-whole": measure_gguf_whole,
        "gguf-floats": measure_gguf_floats,
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
