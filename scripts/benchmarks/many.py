"""Many processes with one pipeline: the figures of `scripts/bench many`.

Times count from the start of the first process, which the environment variable STARTED_AT gives on
the monotonic clock that all processes of a machine share.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Suite, weights_nbytes
from benchmarks.figures import Figure, Result, Sample, Way, speed_up
from benchmarks.probes import Numbers, pss_nbytes, touch

_PROCESSES = 8
_MODELS = ("vae", "text_encoder", "unet")
_DEADLINE_S = 240
_kept: dict[str, Any] = {}


def measure_ready(bench: Bench) -> list[Figure]:
    """Time until all processes are ready, and the memory that they take."""
    large, small = bench.source("sd15-fp32"), bench.source("small-fp32")
    ways: dict[str, Way] = {
        "a job's": _started(bench, job, large),
        "diffusers": _started(bench, plain, large),
        "a job's, tiny models": _started(bench, job, small),
        "diffusers, tiny models": _started(bench, plain, small),
    }
    found = bench.measure(ways, large)
    memory = found.samples("pss_nbytes")
    copy_mb = weights_nbytes(*(large / name for name in _MODELS)) / 2 / 1e6  # bfloat16

    def copies(way: str) -> Sample:
        """Return the memory without the interpreters', which the same with tiny models takes."""
        return (memory[way] - memory[f"{way}, tiny models"]).scaled(1 / copy_mb, "x")

    what = f"{_PROCESSES} processes ready: speed-up over {_PROCESSES} that call from_pretrained"
    return [
        speed_up("many-ready", what, found.samples("ready_s"), at_least=5),
        Figure(
            name="many-memory",
            what=f"memory of all {_PROCESSES} (PSS, no interpreters), in copies of the weights",
            sample=copies("a job's"),
            at_most=1.05,
            beside={"diffusers": copies("diffusers")},
        ),
    ]


def _started(bench: Bench, function: Callable[[str], Numbers], source: Path) -> Way:
    """Return what runs a function that is told when it was started."""

    def run() -> Result:
        found: Result = bench.ask(function, source, STARTED_AT=str(time.monotonic()))
        return found

    return run


# What runs in fresh processes ---------------------------------------------------------------------


def plain(source: str) -> Numbers:
    """Load a pipeline in some processes with diffusers alone.

    Returns:
        `ready_s`, when all processes have the pipeline; `pss_nbytes` of all together, after each
        has read all weights.
    """
    new = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, new.Pool(_PROCESSES) as pool:
        found = pool.imap_unordered(partial(_load, source), [folder] * _PROCESSES)
        pids, _, met_at = zip(*found, strict=True)
        return {"ready_s": max(met_at) - _started_at(), "pss_nbytes": pss_nbytes(pids)}


def _load(source: str, folder: str) -> tuple[int, int, float]:
    """Load it in one of the processes of `plain`, and keep it; return as `_meet`."""
    import torch
    from diffusers import StableDiffusionPipeline

    _kept[source] = StableDiffusionPipeline.from_pretrained(
        source, torch_dtype=torch.bfloat16, safety_checker=None, requires_safety_checker=False
    )
    return _meet(_kept[source], folder)


def job(source: str) -> Numbers:
    """Load it in the processes of a job; return the same numbers."""
    from shmload.integrations import dataprep

    given = {"components": _MODELS, "dtype": "bfloat16", "procs": _PROCESSES}
    with dataprep.Job(source, **given) as made, tempfile.TemporaryDirectory() as folder:
        pids, servers, met_at = zip(*made.map(_meet, [folder] * _PROCESSES), strict=True)
        # The fork server and this process count too.
        nbytes = pss_nbytes({*pids, *servers, os.getpid()})
        return {"ready_s": max(met_at) - _started_at(), "pss_nbytes": nbytes}


def _meet(pipe: Any, folder: str) -> tuple[int, int, float]:
    """Wait until all processes are here, and read all weights.

    Returns:
        This process's pid and its parent's, and when all had come.
    """
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < _PROCESSES:
        assert time.monotonic() < _started_at() + _DEADLINE_S, "a process does not come"
        time.sleep(0.001)
    met_at = time.monotonic()
    touch(getattr(pipe, name) for name in _MODELS)
    return os.getpid(), os.getppid(), met_at


def _started_at() -> float:
    return float(os.environ["STARTED_AT"])


SUITE = Suite(
    measures={"ready": measure_ready},
    sources=("small-fp32", "sd15-fp32"),
    disk_gb=6,
    shm_gb=3,
    # diffusers alone needs a copy of the weights and an interpreter per process.
    memory_gb=_PROCESSES * (2.14 + 0.4),
)
