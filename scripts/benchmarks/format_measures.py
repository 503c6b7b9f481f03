"""Other formats than safetensors: the figures of `scripts/bench formats`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench
from benchmarks.bucket_measures import measure_bucket
from benchmarks.figures import Figure, Line, Target
from benchmarks.gguf_measures import measure_gguf, measure_gguf_floats, measure_gguf_whole
from benchmarks.measures import FROM_PRETRAINED, LOAD_PIPELINE, attach_resident

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.samples import Result


def measure_bin(bench: Bench) -> list[Figure]:
    """`.bin` in float32, wanted in bfloat16: the first load, and an attach."""
    source = bench.sources.fp32_bin
    first = _whole_process(
        bench,
        source,
        name="bin-first",
        what=".bin fp32 to bf16, nothing in memory: whole process, speed-up over from_pretrained",
        target=Target(1.25, is_least=True),
    )
    attach = _attach(
        bench,
        source,
        name="bin-attach",
        what=".bin fp32 to bf16 with weights in memory: speed-up over from_pretrained",
        target=Target(15, is_least=True),
    )
    return [first, attach]


def measure_bin_same_dtype(bench: Bench) -> list[Figure]:
    """`.bin` in the wanted dtype, where there is nothing to convert."""
    figure = _whole_process(
        bench,
        bench.sources.bf16_bin,
        name="bin-same-dtype",
        what=".bin without a cast (bf16), nothing in memory: speed-up over from_pretrained",
        target=Target(0.97, is_least=True),
    )
    return [figure]


def _whole_process(bench: Bench, source: Path, *, name: str, what: str, target: Target) -> Figure:
    ways = {
        "shmload": bench.code(LOAD_PIPELINE, source),
        "diffusers": bench.code(FROM_PRETRAINED, source),
    }
    rounds = bench.measure(ways, source)
    wall = {way: rounds.sample(way, "wall_s") for way in ways}
    return Figure(
        name=name,
        what=what,
        sample=wall["diffusers"] / wall["shmload"],
        unit="x",
        target=target,
        beside=tuple(Line(label=way, sample=sample, unit="s") for way, sample in wall.items()),
    )


def measure_single_file(bench: Bench) -> list[Figure]:
    """One file of SDXL's classes in float16, wanted in bfloat16: an attach."""
    source = bench.sources.sdxl_file
    figure = _attach(
        bench,
        source,
        source / "model.safetensors",
        name="single-file-attach",
        what="one file fp16 to bf16 with weights in memory: speed-up over from_single_file",
        target=Target(5, is_least=True),
    )
    return [figure]


def _attach(
    bench: Bench, source: Path, file: Path | None = None, *, name: str, what: str, target: Target
) -> Figure:
    small = bench.sources.small
    ways: dict[str, Callable[[], Result]] = {
        "shmload": partial(attach_resident, bench, source, file, SHMLOAD_SKELETONS="1"),
        "diffusers": bench.probe("attach", "diffusers", small, source),
    }
    ways["shmload"]()  # the first load asks for the skeleton
    bench.processes.wait_for_skeletons()
    rounds = bench.measure(ways, source)
    bench.evict()
    calls = {way: rounds.sample(way, "call_s") for way in ways}
    private = {way: rounds.sample(way, "private_nbytes").scaled(1e-6) for way in ways}
    return Figure(
        name=name,
        what=what,
        sample=calls["diffusers"] / calls["shmload"],
        unit="x",
        target=target,
        beside=(
            *(Line(label=way, sample=sample, unit="s") for way, sample in calls.items()),
            *(
                Line(label=f"{way}, private memory", sample=sample, unit="MB")
                for way, sample in private.items()
            ),
        ),
    )


FORMAT_MEASURES = {
    "bin": measure_bin,
    "bin-same-dtype": measure_bin_same_dtype,
    "single-file": measure_single_file,
    "gguf": measure_gguf,
    "gguf-whole": measure_gguf_whole,
    "gguf-floats": measure_gguf_floats,
    "bucket": measure_bucket,
}
