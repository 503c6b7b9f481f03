"""Programs that start with their pipeline: the figures of `scripts/bench ready`.

A program is timed from outside, from the command to the line that says it is ready.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, ProbeFailed, Suite
from benchmarks.figures import Figure, Result, speed_up
from benchmarks.load import PARALLEL

_SHMLOAD = Path(sys.executable).with_name("shmload")
_LOADS = """\
import shmload
pipeline = shmload.load_pipeline({source!r}, dtype="bfloat16", keep=True)
print("ready", flush=True)
"""
_DIFFUSERS = """\
import torch
from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained({source!r}, torch_dtype=torch.bfloat16)
print("ready", flush=True)
"""


def measure_prepared(bench: Bench) -> list[Figure]:
    """From the command to a pipeline, with weights in memory and what was built kept."""
    return _against_diffusers(bench, "prepared", _LOADS, at_least=60)


def measure_redirect(bench: Bench) -> list[Figure]:
    """The same for a program that knows nothing of shmload."""
    return _against_diffusers(bench, "redirect", _DIFFUSERS, "--redirect", at_least=20)


def _against_diffusers(
    bench: Bench, name: str, program: str, *options: str, at_least: float
) -> list[Figure]:
    """Measure a program under `shmload run`, and `from_pretrained` under python.

    The first run keeps what it builds; the next template imports the modules of that before it
    serves.
    """
    source = bench.source("sd15-fp32")
    run = [_SHMLOAD, "run", "-v", *options]
    warm = partial(bench.run, [*run, "-m", "shmload", "template", "warm"])
    stop = partial(bench.run, [_SHMLOAD, "template", "stop"])

    def in_template() -> Result:
        ran = bench.run([*run, Path(folder, "first_app.py")])
        if "in the ordinary way" in ran.errors:
            raise ProbeFailed(ran.errors)
        return ran.times

    bench.warm(source)
    with tempfile.TemporaryDirectory(dir=bench.work) as folder:
        Path(folder, "first_app.py").write_text(program.format(source=str(source)))
        try:
            warm()
            in_template()
            stop()
            warm()
            ways = {
                "shmload run": in_template,
                "diffusers, sequential": bench.python(_DIFFUSERS, source),
                "diffusers, parallel": bench.python(_DIFFUSERS, source, **PARALLEL),
            }
            ready = bench.measure(ways, source).samples("ready_s")
        finally:
            stop()
    words = " ".join(["shmload run", *options])
    what = f"`{words}`, from the third run on: speed-up over from_pretrained"
    return [speed_up(name, what, ready, over=list(ways)[1:], at_least=at_least)]


SUITE = Suite(
    measures={"prepared": measure_prepared, "redirect": measure_redirect},
    sources=("sd15-fp32",),
    disk_gb=6,
    shm_gb=3,
    memory_gb=13,
)
