"""One process: the figures of `scripts/bench load`."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import probes
from benchmarks.bench import Bench, Suite, weight_files
from benchmarks.figures import Figure, Rounds, Way, speed_up

# The times of two whole processes vary by more than the 3 % of this target: take more rounds.
_SAME_DTYPE_FACTOR = 3

_IMPORTS = """\
import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer
"""
_FROM_PRETRAINED = """\
import torch
from diffusers import StableDiffusionPipeline
StableDiffusionPipeline.from_pretrained({source!r}, torch_dtype=torch.bfloat16)
"""
_LOAD_PIPELINE = """\
import shmload
shmload.load_pipeline({source!r}, dtype="bfloat16")
"""
PARALLEL = {"HF_ENABLE_PARALLEL_LOADING": "1"}


# Whole pipelines ----------------------------------------------------------------------------------


def measure_attach(bench: Bench) -> list[Figure]:
    """`load_pipeline` with weights in memory: time, with and without first use; private memory."""
    source = bench.source("sd15-fp32")
    load = partial(bench.load, "pipeline", small=bench.source("small-fp32"), source=source)
    without = "shmload, with SHMLOAD_REMEMBER=0"
    diffusers = "diffusers, sequential", "diffusers, parallel"
    ways = {
        "shmload": load("shmload"),
        without: load("shmload", SHMLOAD_REMEMBER="0"),
        diffusers[0]: load("diffusers"),
        diffusers[1]: load("diffusers", **PARALLEL),
    }
    rounds = bench.measure(ways, source)
    calls, private = rounds.samples("call_s"), rounds.samples("private_nbytes")
    both = {way: sample + rounds.sample(way, "touch_s") for way, sample in calls.items()}
    share = private["shmload"] / rounds.sample("shmload", "weights_nbytes")
    what = "load_pipeline with weights in memory: speed-up over from_pretrained"
    touched = "the same call and a touch of every page: speed-up over from_pretrained"
    return [
        speed_up("attach", what, calls, over=diffusers, at_least=15),
        speed_up("first-use", touched, both, over=diffusers),
        Figure(
            name="memory",
            what="what it adds to the process's private memory, as a share of the weights",
            sample=share.scaled(100, "%"),
            at_most=2,
            beside=private,
        ),
    ]


def whole_process(bench: Bench, source: Path, **options: Any) -> Rounds:
    """Measure processes that load a source and end, by shmload and by diffusers."""
    ways = {
        "shmload": bench.python(_LOAD_PIPELINE, source),
        "diffusers": bench.python(_FROM_PRETRAINED, source),
    }
    return bench.measure(ways, source, **options)


def measure_first_load(bench: Bench) -> list[Figure]:
    """First load, nothing in memory: the time of a whole process."""
    source = bench.source("sd15-fp32")
    ways = {
        "imports alone": bench.python(_IMPORTS),
        "shmload": bench.python(_LOAD_PIPELINE, source),
        "diffusers": bench.python(_FROM_PRETRAINED, source),
    }
    wall = bench.measure(ways, source).samples("wall_s")
    return [
        Figure(
            name="first-load",
            what="first load, nothing in memory: whole process, against imports alone",
            sample=wall["shmload"] / wall["imports alone"],
            at_most=1.10,
            beside=wall,
        )
    ]


def measure_same_dtype(bench: Bench) -> list[Figure]:
    """Load without a cast, where shmload saves no conversion: it must not cost time."""
    rounds = whole_process(bench, bench.source("sd15-bf16"), factor=_SAME_DTYPE_FACTOR)
    return [
        speed_up(
            "same-dtype",
            "load without a cast (bf16): whole process, speed-up over from_pretrained",
            rounds.samples("wall_s"),
            at_least=0.97,
        )
    ]


def measure_decode(bench: Bench) -> list[Figure]:
    """Decoding float32 to bfloat16 on all cores, against as many times a plain loop on one."""
    source, cores = bench.source("sd15-fp32"), len(os.sched_getaffinity(0))
    loop = "read, cast and write in one process"
    ways: dict[str, Way] = {
        "shmload": partial(bench.decode, source, cores),
        loop: bench.probe(probes.cast_files, *weight_files(source)),
    }
    rates = bench.measure(ways, source).samples("bytes_per_s")
    return [
        Figure(
            name="decode",
            what=f"decoding fp32 to bf16, {cores} workers: throughput, of {cores} plain loops'",
            sample=(rates["shmload"] / rates[loop]).scaled(100 / cores, "%"),
            at_least=85,
            beside=rates,
        )
    ]


SUITE = Suite(
    measures={
        "attach": measure_attach,
        "first-load": measure_first_load,
        "same-dtype": measure_same_dtype,
        "decode": measure_decode,
    },
    sources=("small-fp32", "sd15-fp32", "sd15-bf16"),
    disk_gb=9,
    shm_gb=3,
    memory_gb=13,
)
