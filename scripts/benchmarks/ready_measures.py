"""Programs that start with their pipeline: the figures of `scripts/bench ready`.

A program is timed from the command to the line that says it is ready, from outside.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.programs import READY, Programs, programs_of
from benchmarks.samples import Result, Rounds, Sample

_DTYPE = "bfloat16"
_FIRST_LINES = 5  # a first line takes tens of milliseconds: take more rounds

_SHMLOAD = f"""\
import shmload
pipeline = shmload.load_pipeline({{source!r}}, dtype="{_DTYPE}", keep=True)
print({READY!r}, flush=True)
"""
_DIFFUSERS = f"""\
import torch
from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained({{source!r}}, dtype=torch.{_DTYPE})
print({READY!r}, flush=True)
"""
_FIRST_LINE = f"print({READY!r}, flush=True)\n"
_PARALLEL = {"HF_ENABLE_PARALLEL_LOADING": "1"}


def measure_ready(bench: Bench) -> list[Figure]:
    """From the command to a pipeline ready to run, with weights in memory."""
    with _programs(bench) as (programs, shmload, diffusers):
        bench.processes.probe("warm", bench.sources.fp32, _DTYPE, None)
        _prepare(programs, "--no-prepare", shmload)
        ways: dict[str, Callable[[], Result]] = {
            "shmload run --no-prepare": partial(programs.run, "--no-prepare", shmload),
            "shmload under python": partial(programs.python, shmload),
            "sequential": partial(programs.python, diffusers),
            "parallel": partial(programs.python, diffusers, **_PARALLEL),
        }
        rounds = bench.measure(ways, bench.sources.fp32)
    bench.evict()
    ready, best = _ready(rounds)
    lines = (
        *(Line(label=way, sample=sample, unit="s") for way, sample in ready.items()),
        Line(
            label="shmload run --no-prepare, to its end",
            sample=rounds.sample("shmload run --no-prepare", "wall_s"),
            unit="s",
        ),
    )
    return [
        Figure(
            name="ready",
            what="`shmload run --no-prepare`, from the command to a pipeline: speed-up over "
            "from_pretrained",
            sample=ready[best] / ready["shmload run --no-prepare"],
            unit="x",
            target=Target(30, is_least=True),
            beside=lines,
        ),
        Figure(
            name="ready-s",
            what="`shmload run --no-prepare`, from the command to a pipeline",
            sample=ready["shmload run --no-prepare"],
            unit="s",
            target=Target(0.25),
        ),
    ]


def measure_prepared(bench: Bench) -> list[Figure]:
    """The same for a program whose pipeline the template has loaded ahead.

    It is loaded while the next way runs, which takes seconds.
    """
    with _programs(bench) as (programs, shmload, diffusers):
        prepared = partial(programs.run, shmload)
        bench.processes.probe("warm", bench.sources.fp32, _DTYPE, None)
        _prepare(programs, shmload)
        programs.run(shmload)  # the second of two runs in a row
        ways: dict[str, Callable[[], Result]] = {
            "shmload run": prepared,
            "sequential": partial(programs.python, diffusers),
            "parallel": partial(programs.python, diffusers, **_PARALLEL),
        }
        rounds = bench.measure(ways, bench.sources.fp32)
    bench.evict()
    ready, best = _ready(rounds)
    return [
        Figure(
            name="prepared",
            what="`shmload run`, from the third run on: speed-up over from_pretrained",
            sample=ready[best] / ready["shmload run"],
            unit="x",
            target=Target(120, is_least=True),
            beside=(
                *(Line(label=way, sample=sample, unit="s") for way, sample in ready.items()),
                Line(label="from_pretrained, the better", sample=ready[best], unit="s"),
            ),
        ),
        Figure(
            name="prepared-s",
            what="`shmload run`, from the third run on",
            sample=ready["shmload run"],
            unit="s",
            target=Target(0.06),
        ),
    ]


def measure_redirect(bench: Bench) -> list[Figure]:
    """The same for a program that knows nothing of shmload, from its second start on."""
    with _programs(bench) as (programs, _, diffusers):
        redirected = partial(programs.run, "--redirect", diffusers)
        _prepare(programs, "--redirect", diffusers)
        programs.run("--redirect", diffusers)  # the second of two runs in a row
        ways: dict[str, Callable[[], Result]] = {
            "shmload run --redirect": redirected,
            "sequential": partial(programs.python, diffusers),
            "parallel": partial(programs.python, diffusers, **_PARALLEL),
        }
        rounds = bench.measure(ways, bench.sources.fp32)
    bench.evict()
    ready, best = _ready(rounds)
    return [
        Figure(
            name="redirect",
            what="`shmload run --redirect`, an unchanged diffusers program, third start: speed-up",
            sample=ready[best] / ready["shmload run --redirect"],
            unit="x",
            target=Target(20, is_least=True),
            beside=tuple(Line(label=way, sample=sample, unit="s") for way, sample in ready.items()),
        )
    ]


def measure_first_line(bench: Bench) -> list[Figure]:
    """The first line of a program that imports nothing."""
    with _programs(bench) as (programs, _, _):
        programs.warm_template()
        ways: dict[str, Callable[[], Result]] = {
            "shmload run": partial(programs.run, "-c", _FIRST_LINE),
            "python": partial(programs.python, "-c", _FIRST_LINE),
        }
        rounds = bench.measure(ways, factor=_FIRST_LINES)
    first = {way: rounds.sample(way, "ready_s").scaled(1e3) for way in ways}
    wall = {way: rounds.sample(way, "wall_s").scaled(1e3) for way in ways}
    return [
        Figure(
            name="first-line",
            what="the first line of a program under `shmload run`, against `python -c`",
            sample=first["shmload run"] / first["python"],
            unit="x",
            target=Target(2),
            beside=(
                *(Line(label=way, sample=sample, unit="ms") for way, sample in first.items()),
                *_ends(wall),
            ),
        )
    ]


READY_MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "ready": measure_ready,
    "prepared": measure_prepared,
    "redirect": measure_redirect,
    "first-line": measure_first_line,
}
"""Measurements by their name for `--only`, in the order of the table."""


@contextmanager
def _programs(bench: Bench) -> Iterator[tuple[Programs, str, str]]:
    """Yield a starter of programs, and the scripts that load with shmload and with diffusers."""
    with (
        tempfile.TemporaryDirectory(dir=bench.sources.work, prefix="scripts-") as folder,
        programs_of(bench.processes) as programs,
    ):
        paths = []
        for name, text in (("shmload_app.py", _SHMLOAD), ("diffusers_app.py", _DIFFUSERS)):
            path = Path(folder, name)
            path.write_text(text.format(source=str(bench.sources.fp32)))
            paths.append(str(path))
        yield programs, paths[0], paths[1]


def _ready(rounds: Rounds) -> tuple[dict[str, Sample], str]:
    """Return the times to the line `READY` by way, and the quicker of diffusers' two ways."""
    ready = {way: rounds.sample(way, "ready_s") for way in rounds.results}
    return ready, min(("sequential", "parallel"), key=lambda way: ready[way].median)


def _prepare(programs: Programs, *program: str) -> None:
    """Run a program until it has its skeleton, and the template all that the program imports.

    A template that has met new imports would start again when it is idle; it is stopped, so that
    the second run is one of the next template, which has them.
    """
    programs.warm_template()
    programs.run(*program)
    programs.processes.wait_for_skeletons()
    programs.stop_templates()
    programs.warm_template()
    programs.run(*program)


def _ends(wall: dict[str, Sample]) -> tuple[Line, ...]:
    return tuple(
        Line(label=f"{way}, to its end", sample=sample, unit="ms") for way, sample in wall.items()
    )
