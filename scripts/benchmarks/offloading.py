"""Calls that move weights to a device and back: their figures in `scripts/bench offloading`.

The device is a stand-in: its memory and its computing are the host's. So a time counts what the
call and the copies cost beside a run, and says nothing about a GPU.
"""

import ctypes
import gc
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Suite
from benchmarks.figures import Figure, Sample
from benchmarks.probes import Clients, Numbers, command_of, private_nbytes, tell

CALLS = {
    "none": "runs on the CPU",
    "to": 'pipe.to(device), pipe.to("cpu")',
    "modules": "module.to(device), module.cpu()",
    "model": "enable_model_cpu_offload",
    "sequential": "enable_sequential_cpu_offload",
    "accelerate": "accelerate's cpu_offload",
    "manager": "ComponentsManager.enable_auto_cpu_offload",
    "blocks": "enable_group_offload, block_level",
    "leaves": "enable_group_offload, leaf_level",
    "streams-blocks": "enable_group_offload, block_level, use_stream",
    "streams-leaves": "enable_group_offload, leaf_level, use_stream",
    "streams-little-blocks": "the same, block_level, with low_cpu_mem_usage",
    "streams-little-leaves": "the same, leaf_level, with low_cpu_mem_usage",
}
# What the library pins, it copies.
_PINS = {name for name in CALLS if name.startswith("streams")}
_RUNS = 3
_PROCESSES = 4
_SUPPORT = Path(__file__).parents[2] / "tests" / "support"


def measure(name: str, bench: Bench) -> list[Figure]:
    """One call: what it makes private, what it copies, and how long a run takes."""
    source = bench.source("sd-small-bf16")
    ways = {way: bench.probe(run, name, way, source) for way in ("shmload", "diffusers")}
    bench.warm(source)
    rounds = bench.measure(ways, source)
    growth = rounds.samples("growth")
    runs = rounds.samples("run_s")
    copies = bench.ask(run_together, name, source)["copies"]
    bench.evict()
    words, pins = CALLS[name], name in _PINS
    return [
        Figure(
            name=f"{name}-growth",
            what=f"{words}: private growth after {_RUNS} runs, as a share of the weights",
            sample=growth["shmload"].scaled(100, "%"),
            at_most=None if pins else 2,
            beside={
                "diffusers": growth["diffusers"].scaled(100, "%"),
                "in segments": rounds.sample("shmload", "in_segments").scaled(100, "%"),
                "copied from the device": rounds.sample("shmload", "copied").scaled(100, "%"),
            },
        ),
        Figure(
            name=f"{name}-copies",
            what=f"{words}: copies of the weights that {_PROCESSES} processes have",
            sample=Sample((copies,)),
            at_most=None if pins else 1.05,
        ),
        Figure(
            name=f"{name}-time",
            what=f"{words}: time of a run, against the library's own load",
            sample=runs["shmload"] / runs["diffusers"],
            at_most=1,
            beside=runs,
        ),
    ]


SUITE = Suite(
    measures={name: partial(measure, name) for name in CALLS},
    sources=("sd-small-bf16",),
    disk_gb=0.3,
    shm_gb=0.3,
    memory_gb=6,
)


# What runs in fresh processes ---------------------------------------------------------------------


def run(name: str, way: str, source: str) -> Numbers:
    """Run a pipeline under one of the calls.

    Returns:
        `growth` of the private memory, beside the device's; `in_segments`, weights that lie there;
        `copied` from the device by the last run; all as shares of the weights. `run_s`, the time
        of the last run.
    """
    pipe = _load(way, source)
    o = _support()
    weights_nbytes = o.nbytes(pipe)
    begin, generate = o.CALLS[name]
    o.generate(pipe)  # makes what the libraries keep for later runs
    before = _own_nbytes()
    begin(pipe)
    for _ in range(_RUNS):
        copied, began = o.from_device(), time.perf_counter()
        generate(pipe)
        run_s = time.perf_counter() - began
    outside = o.nbytes(pipe, set(o.all_outside(pipe)))
    return {
        "growth": (_own_nbytes() - before) / weights_nbytes,
        "in_segments": 1 - outside / weights_nbytes if way == "shmload" else 0,
        "copied": (o.from_device() - copied) / weights_nbytes,
        "run_s": run_s,
    }


def run_together(name: str, source: str) -> Numbers:
    """Run a pipeline in some processes at once.

    Returns:
        `copies` of the weights that they have together.
    """
    with Clients(command_of(stay, name, source), _PROCESSES) as clients:
        answers = [[float(each) for each in answer.split()] for answer in clients.hear()]
        return {"copies": 1 + sum(growth for (growth,) in answers)}


def stay(name: str, source: str) -> None:
    """Be one of the processes of `run_together`."""
    tell(run(name, "shmload", source)["growth"])
    sys.stdin.readline()


def _load(way: str, source: str) -> Any:
    import torch

    torch.set_num_threads(1)  # several of these processes run at once
    o = _support()
    if way == "shmload":
        return o.load(source, dtype="bfloat16")
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _support() -> Any:
    sys.path.append(str(_SUPPORT))
    import offloading

    return offloading


def _own_nbytes() -> int:
    import stand_in

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed would count
    return private_nbytes() - stand_in.counts().held
