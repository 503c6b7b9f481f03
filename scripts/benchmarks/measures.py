"""One process: the figures of `scripts/bench`.

Every function measures its ways in turn (`samples.interleave`) and returns the figures.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.key_measures import measure_keys, measure_tensors
from benchmarks.processes import ProbeFailed
from benchmarks.samples import Result, Rounds
from benchmarks.sources import weight_files, weights_nbytes

_DTYPE = "bfloat16"
# The times of two whole processes vary by more than the 3 % of this target: take more rounds.
_SAME_DTYPE_FACTOR = 3
_SMALL_CALLS = 7
_ATTACH_ATTEMPTS = 3

_IMPORTS = """\
import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer
"""
FROM_PRETRAINED = """\
import torch
from diffusers import StableDiffusionPipeline
StableDiffusionPipeline.from_pretrained({source!r}, torch_dtype=torch.bfloat16)
"""
LOAD_PIPELINE = """\
import shmload
shmload.load_pipeline({source!r}, dtype="bfloat16")
"""


def measure_attach(bench: Bench) -> list[Figure]:
    """`load_pipeline` with weights in memory: time and private memory."""
    small, source = bench.sources.small, bench.sources.fp32

    ways: dict[str, Callable[[], Result]] = {
        "shmload": partial(attach_resident, bench, source, SHMLOAD_SKELETONS="1"),
        "without": partial(attach_resident, bench, source),
        "sequential": bench.probe("attach", "diffusers", small, source),
        "parallel": bench.probe(
            "attach", "diffusers", small, source, HF_ENABLE_PARALLEL_LOADING="1"
        ),
    }
    ways["shmload"]()  # the first load asks for the skeleton
    bench.processes.wait_for_skeletons()
    rounds = bench.measure(ways, source)
    bench.evict()
    calls = {way: rounds.sample(way, "call_s") for way in rounds.results}
    best = min(("sequential", "parallel"), key=lambda way: calls[way].median)
    touched = {way: calls[way] + rounds.sample(way, "touch_s") for way in calls}
    private = {way: rounds.sample(way, "private_nbytes").scaled(1e-6) for way in calls}
    weights = rounds.sample("shmload", "weights_nbytes").scaled(1e-6)
    return [
        Figure(
            name="attach",
            what="load_pipeline with weights in memory: speed-up over from_pretrained",
            sample=calls[best] / calls["shmload"],
            unit="x",
            target=Target(15, is_least=True),
            beside=(
                Line(label="shmload", sample=calls["shmload"], unit="s"),
                Line(
                    label="shmload, with SHMLOAD_SKELETONS=0",
                    sample=calls["without"],
                    unit="s",
                ),
                Line(label="diffusers, the better", sample=calls[best], unit="s"),
                Line(label="diffusers, sequential", sample=calls["sequential"], unit="s"),
                Line(label="diffusers, parallel", sample=calls["parallel"], unit="s"),
                Line(
                    label="shmload, call and touch of every page",
                    sample=touched["shmload"],
                    unit="s",
                ),
                Line(
                    label="diffusers, call and touch of every page", sample=touched[best], unit="s"
                ),
                *_cpu_lines(rounds, {"shmload": "shmload", "diffusers, the better": best}),
            ),
        ),
        Figure(
            name="memory",
            what="what it adds to the process's private memory, as a share of the weights",
            sample=(private["shmload"] / weights).scaled(100),
            unit="%",
            target=Target(2),
            beside=(
                Line(label="shmload", sample=private["shmload"], unit="MB"),
                Line(label="diffusers", sample=private[best], unit="MB"),
                Line(label="weights of the pipeline", sample=weights, unit="MB"),
            ),
        ),
    ]


def measure_first_load(bench: Bench) -> list[Figure]:
    """First load, nothing in memory: the time of a whole process."""
    source = bench.sources.fp32

    def without_memory() -> Result:
        code = LOAD_PIPELINE.format(source=str(source))
        with tempfile.TemporaryDirectory(dir=bench.sources.work) as empty:
            return bench.processes.time_code(code, SHMLOAD_CACHE_DIR=empty)

    rounds = bench.measure(
        {
            "imports alone": bench.code(_IMPORTS),
            "shmload": bench.code(LOAD_PIPELINE, source),
            "diffusers": bench.code(FROM_PRETRAINED, source),
            "shmload, nothing remembered yet": without_memory,
        },
        source,
    )
    wall = {way: rounds.sample(way, "wall_s") for way in rounds.results}
    return [
        Figure(
            name="first-load",
            what="first load, nothing in memory: whole process, against imports alone",
            sample=wall["shmload"] / wall["imports alone"],
            unit="x",
            target=Target(1.10),
            beside=(
                *(Line(label=way, sample=sample, unit="s") for way, sample in wall.items()),
                *_cpu_lines(
                    rounds, {way: way for way in ("imports alone", "shmload", "diffusers")}
                ),
            ),
        )
    ]


def measure_same_dtype(bench: Bench) -> list[Figure]:
    """Load without a cast, where shmload saves no conversion: it must not cost time."""
    source = bench.sources.bf16
    ways = {
        "shmload": bench.code(LOAD_PIPELINE, source),
        "diffusers": bench.code(FROM_PRETRAINED, source),
    }
    rounds = bench.measure(ways, source, factor=_SAME_DTYPE_FACTOR)
    wall = {way: rounds.sample(way, "wall_s") for way in ways}
    cpu = {way: rounds.sample(way, "cpu_s") for way in ways}
    return [
        Figure(
            name="same-dtype",
            what="load without a cast (bf16): whole process, against from_pretrained",
            sample=wall["shmload"] / wall["diffusers"],
            unit="x",
            target=Target(1.03),
            beside=(
                Line(label="shmload", sample=wall["shmload"], unit="s"),
                Line(label="diffusers", sample=wall["diffusers"], unit="s"),
                Line(label="difference", sample=wall["shmload"] - wall["diffusers"], unit="s"),
                *_cpu_lines(rounds, {way: way for way in ways}),
                Line(
                    label="ratio of processor time",
                    sample=cpu["shmload"] / cpu["diffusers"],
                    unit="x",
                ),
            ),
        )
    ]


def measure_small(bench: Bench) -> list[Figure]:
    """A tiny pipeline: the time that shmload adds to `from_pretrained`."""
    source = bench.sources.small
    rounds = bench.measure(
        {
            "shmload": bench.probe("repeat", "shmload", source, _SMALL_CALLS),
            "diffusers": bench.probe("repeat", "diffusers", source, _SMALL_CALLS),
            "shmload, whole process": bench.code(LOAD_PIPELINE, source),
            "diffusers, whole process": bench.code(FROM_PRETRAINED, source),
        },
        source,
    )
    nbytes = weights_nbytes(source)
    figures = []
    for name, what, suffix, key in (
        ("small", "", "", "call_s"),
        ("small-process", ", whole process", ", whole process", "wall_s"),
    ):
        ours = rounds.sample(f"shmload{suffix}", key)
        theirs = rounds.sample(f"diffusers{suffix}", key)
        figures.append(
            Figure(
                name=name,
                what=f"a pipeline of {nbytes / 1e6:.1f} MB{what}: time added to from_pretrained",
                sample=ours - theirs,
                unit="s",
                target=Target(0.15),
                beside=(
                    Line(label="shmload", sample=ours, unit="s"),
                    Line(label="diffusers", sample=theirs, unit="s"),
                ),
            )
        )
    return figures


def measure_decode(bench: Bench) -> list[Figure]:
    """Decoding by workers, against a plain loop: pread, convert, write."""
    # Raw bytes come from the bf16 source, which makes segments of 2.7 GB too.
    cases = (
        ("bf16", "decoding fp32 to bf16", bench.sources.fp32, _DTYPE, _DTYPE),
        ("fp16", "decoding fp32 to fp16", bench.sources.fp32, "float16", "float16"),
        ("raw", "copying raw bytes", bench.sources.bf16, _DTYPE, "raw"),
    )
    cores = len(os.sched_getaffinity(0))
    figures = []
    for case, what, source, dtype, loop_dtype in cases:
        counts = sorted({1, cores}) if case == "bf16" else [cores]
        ways = {f"{case} loop": bench.probe("plain_loop", loop_dtype, *weight_files(source))}
        for count in counts:
            ways[f"{case} {count}"] = partial(warm_and_evict, bench, source, dtype, count)
        rounds = bench.measure(ways, source)
        loop = rounds.sample(f"{case} loop", "bytes_per_s").scaled(1e-9)
        for count in counts:
            decode = rounds.sample(f"{case} {count}", "decode_bytes_per_s").scaled(1e-9)
            whole = rounds.sample(f"{case} {count}", "bytes_per_s").scaled(1e-9)
            figures.append(
                Figure(
                    name=f"decode-{case}-{count}",
                    what=f"{what}, workers: {count}; throughput, against {count} x a plain loop",
                    sample=(decode / loop).scaled(100 / count),
                    unit="%",
                    target=Target(80, is_least=True) if case == "bf16" else None,
                    beside=(
                        Line(label="shmload, workers running", sample=decode, unit="GB/s"),
                        Line(label="plain loop, one process", sample=loop, unit="GB/s"),
                        Line(label="shmload.warm(), start to end", sample=whole, unit="GB/s"),
                    ),
                )
            )
    return figures


def measure_floors(bench: Bench) -> list[Figure]:
    """This machine's floors: times and throughputs that no loader can beat."""
    largest = max(weight_files(bench.sources.fp32), key=lambda path: path.stat().st_size)
    starts = {
        "Python starts and ends": "pass",
        "import shmload": "import shmload",
        "import torch": "import torch",
        "import the pipeline's classes": _IMPORTS,
    }
    rounds = bench.measure(
        {
            **{what: bench.code(code) for what, code in starts.items()},
            "memory": bench.probe("memory_floors", largest),
        },
        largest.parent,
    )
    memory = {
        "copy": "copy memory to memory, pages in use",
        "read": "pread of cached file, 1 MiB at a time",
        "allocate_shared": "pwrite to fresh pages in /dev/shm",
        "rewrite_shared": "pwrite to the same pages again",
        "allocate_private": "first touch of fresh private pages",
        "touch_shared": "first touch of attached shared pages",
    }
    return [
        *(
            Figure(name=f"floor: {what}", what=what, sample=rounds.sample(what, "wall_s"), unit="s")
            for what in starts
        ),
        *(
            Figure(
                name=f"floor: {name}",
                what=what,
                sample=rounds.sample("memory", name).scaled(1e-9),
                unit="GB/s",
            )
            for name, what in memory.items()
        ),
    ]


MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "attach": measure_attach,
    "first-load": measure_first_load,
    "same-dtype": measure_same_dtype,
    "tensors": measure_tensors,
    "keys": measure_keys,
    "small": measure_small,
    "decode": measure_decode,
    "floors": measure_floors,
}
"""Measurements by their name for `--only`, in the order of the table."""


def attach_resident(
    bench: Bench, source: Path, file: Path | None = None, **variables: str
) -> Result:
    """Measure an attach; repeat it if another program removed the segments during it.

    Args:
        bench: the context.
        source: to load.
        file: to warm, if it is not the source.
        variables: of the environment.
    """
    for _ in range(_ATTACH_ATTEMPTS):
        bench.processes.probe("warm", file or source, _DTYPE, None)
        before = bench.resident()
        small = bench.sources.small
        result = bench.processes.probe("attach", "shmload", small, source, **variables)
        if bench.resident() == before:
            return result
        bench.announce("another program removed the segments; once more")
    raise ProbeFailed("another program keeps removing the segments")


def warm_and_evict(bench: Bench, source: Path, dtype: str, workers: int) -> Result:
    try:
        return bench.processes.probe("warm", source, dtype, workers)
    finally:
        bench.evict()


def _cpu_lines(rounds: Rounds, ways: dict[str, str]) -> tuple[Line, ...]:
    """Return lines with the processor time of all processes of a run, by label and way."""
    return tuple(
        Line(label=f"{label}, processor time", sample=rounds.sample(way, "cpu_s"), unit="s")
        for label, way in ways.items()
    )
