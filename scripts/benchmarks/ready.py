"""Programs that start with their pipeline: the figures of `scripts/bench ready`.

A program is timed from outside, from the command to the line that says it is ready.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from proc import pids_with, stat_of

from benchmarks.bench import Bench, ProbeFailed, Suite, Way
from benchmarks.figures import Figure, Result, Rounds, Sample, better, labelled, sample_of, speed_up
from benchmarks.load import PARALLEL
from shmload._host.procfs import rollup_nbytes

_FIRST_LINES = 5  # a first line takes tens of milliseconds: take more rounds
_ROUNDS = 8
_FIRST_ROUNDS = 2
"""Rounds of several programs in which the template may still import their modules."""
_GAP_S = 1.0
_SHMLOAD = Path(sys.executable).with_name("shmload")

_READY = "ready"
_FIRST_LINE = f"print({_READY!r}, flush=True)\n"
_LOADS = """\
import logging, shmload
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("shmload").addHandler(handler)
logging.getLogger("shmload").setLevel("INFO")
pipeline = shmload.load_pipeline({source!r}, dtype="bfloat16", keep=True)
print("ready", flush=True)
print("recalled", int(any("what an earlier load has built" in each for each in said)))
"""
_DIFFUSERS = """\
import torch
from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained({source!r}, dtype=torch.bfloat16)
print("ready", flush=True)
"""
# By name: the program, and its source.
_PROGRAMS = {
    "first": (_LOADS, "sd15-fp32"),
    "second": (_LOADS, "sd15-bf16"),
    "third": ("# the first one again\n" + _LOADS, "sd15-fp32"),
    "nothing": (_FIRST_LINE + "print('recalled 0')\n", ""),
    "diffusers": (_DIFFUSERS, "sd15-fp32"),
    "diffusers-second": (_DIFFUSERS, "sd15-bf16"),
}


@dataclass(frozen=True, slots=True)
class Programs:
    """Starts programs under `python` and under `shmload run`."""

    bench: Bench
    folder: Path

    def python(self, *arguments: str, **variables: str) -> Result:
        """Run a program in the ordinary way; see `_time`."""
        return self._time([sys.executable, *self._paths(arguments)], variables)

    def run(self, *arguments: str) -> Result:
        """Run a program in a copy of a template; see `_time`."""
        return self._time([str(_SHMLOAD), "run", "-v", *self._paths(arguments)], {})

    def _paths(self, arguments: tuple[str, ...]) -> list[str]:
        """Replace the names of programs by their files."""
        return [str(self.folder / f"{a}_app.py") if a in _PROGRAMS else a for a in arguments]

    def _time(self, command: list[str], variables: dict[str, str]) -> Result:
        """Return the times of a program, and the numbers that it printed, by their names.

        Raises:
            ProbeFailed: it failed, was run in the ordinary way against its wish, or printed
                something else.
        """
        ran = self.bench.run(command, variables)
        first_line, *rest = ran.output.splitlines() or [""]
        if first_line != _READY or "in the ordinary way" in ran.errors:
            raise ProbeFailed(f"{command} printed {ran.output!r}:\n{ran.errors}")
        pairs = (text.split() for text in rest)
        return {**ran.times, **{name: float(value) for name, value in pairs}}

    def warm(self, *options: str) -> None:
        """Start the template of programs with these options of `run`, and wait until it serves."""
        self.bench.run([_SHMLOAD, "run", "-v", *options, "-m", "shmload", "template", "warm"], {})

    def stop(self) -> None:
        """End all templates."""
        self.bench.run([_SHMLOAD, "template", "stop"], {})

    def prepare(self, *programs: tuple[str, ...]) -> None:
        """Run programs once, and have a template that has the modules of what they keep.

        The next template imports the modules of what they have kept before it serves.
        """
        for *options, name in programs:
            self.warm(*options)
            self.run(*options, name)
        self.stop()
        for *options, _ in programs:
            self.warm(*options)


@contextlib.contextmanager
def _programs(bench: Bench) -> Iterator[Programs]:
    """Yield a starter of programs; end its templates and remove the segments afterwards."""
    with tempfile.TemporaryDirectory(dir=bench.work, prefix="scripts-") as folder:
        for name, (text, source) in _PROGRAMS.items():
            path = Path(folder, f"{name}_app.py")  # no name of a library
            path.write_text(text.format(source=str(bench.source(source))))
        programs = Programs(bench, Path(folder))
        try:
            yield programs
        finally:
            programs.stop()
            bench.evict()


def _against_diffusers(
    bench: Bench, program: tuple[str, ...], *, runs: int, beside: dict[str, tuple[str, ...]]
) -> tuple[Rounds, dict[str, Sample], str]:
    """Measure a program under `shmload run`, others under python, and diffusers' two ways.

    Returns:
        the rounds; the times to the line by way, `shmload run` first; diffusers' better way.
    """
    way = " ".join(["shmload run", *program[:-1]])
    with _programs(bench) as programs:
        bench.warm(bench.source("sd15-fp32"))
        programs.prepare(program)
        for _ in range(runs):
            programs.run(*program)
        ways: dict[str, Way] = {
            way: partial(programs.run, *program),
            **{name: partial(programs.python, *other) for name, other in beside.items()},
            "sequential": partial(programs.python, "diffusers"),
            "parallel": partial(programs.python, "diffusers", **PARALLEL),
        }
        rounds = bench.measure(ways, bench.source("sd15-fp32"))
    ready = rounds.samples("ready_s")
    return rounds, ready, better(ready)


def measure_prepared(bench: Bench) -> list[Figure]:
    """From the command to a pipeline ready to run, with weights in memory and what was built kept.

    The template imports the modules of that while the next way runs, which takes seconds.
    """
    _, ready, best = _against_diffusers(bench, ("first",), runs=2, beside={})
    what = "`shmload run`, from the third run on"
    return [
        speed_up(
            "prepared",
            f"{what}: speed-up over from_pretrained",
            ready,
            over=best,
            ours="shmload run",
            at_least=60,
            beside={"from_pretrained, the better": ready[best]},
        ),
        Figure(name="prepared-s", what=what, sample=ready["shmload run"], at_most=0.12),
    ]


def measure_redirect(bench: Bench) -> list[Figure]:
    """The same for a program that knows nothing of shmload, from its second start on."""
    _, ready, best = _against_diffusers(bench, ("--redirect", "diffusers"), runs=2, beside={})
    return [
        speed_up(
            "redirect",
            "`shmload run --redirect`, an unchanged diffusers program, third start: speed-up",
            ready,
            over=best,
            ours="shmload run --redirect",
            at_least=20,
        )
    ]


def measure_first_line(bench: Bench) -> list[Figure]:
    """The first line of a program that imports nothing."""
    with _programs(bench) as programs:
        programs.warm()
        ways: dict[str, Way] = {
            "shmload run": partial(programs.run, "-c", _FIRST_LINE),
            "python": partial(programs.python, "-c", _FIRST_LINE),
        }
        rounds = bench.measure(ways, factor=_FIRST_LINES)
    first = rounds.samples("ready_s")
    lines = first | labelled("{}, to its end", rounds.samples("wall_s"))
    return [
        Figure(
            name="first-line",
            what="the first line of a program under `shmload run`, against `python -c`",
            sample=first["shmload run"] / first["python"],
            at_most=2,
            beside={label: sample.scaled(1e3, "ms") for label, sample in lines.items()},
        )
    ]


# Several programs in turn under one template ------------------------------------------------------


def measure_several(bench: Bench) -> list[Figure]:
    """Three programs over two pipelines with a pause between, against `from_pretrained`."""
    with _several(bench) as programs:
        rounds = _rounds_of(programs, _GAP_S)
        waiting = _private_nbytes(bench.runtime)
        plain = [
            programs.python(name) for name in ("diffusers", "diffusers-second") for _ in range(3)
        ]
    late = [result for round_ in rounds[_FIRST_ROUNDS:] for result in round_]
    run_s, python_s = sample_of(late, "wall_s"), sample_of(plain, "wall_s")
    return [
        Figure(
            name="several-ready",
            what="three programs over two pipelines in turn, 1 s between: runs from the third "
            "round on that recall theirs",
            sample=_recalled_share(late),
            at_least=95,
        ),
        Figure(
            name="several",
            what="the same, the whole process: speed-up over python with from_pretrained",
            sample=Sample((python_s.median / run_s.median,), "x"),
            at_least=60,
            beside={"shmload run": run_s, "python": python_s},
        ),
        Figure(
            name="several-private",
            what="private memory of the largest process that waits, but for the template",
            sample=Sample((max(waiting, default=0) / 1e6,), "MB"),
            at_most=60,
            beside={"each process that waits": Sample(tuple(waiting) or (0.0,)).scaled(1e-6, "MB")},
        ),
    ]


@contextlib.contextmanager
def _several(bench: Bench) -> Iterator[Programs]:
    """Yield a starter of programs.

    Both pipelines are kept, and a template serves.
    """
    for name in ("sd15-fp32", "sd15-bf16"):
        bench.warm(bench.source(name))
    with _programs(bench) as programs:
        programs.prepare(("first",), ("second",))
        yield programs


def _rounds_of(programs: Programs, gap_s: float) -> list[list[Result]]:
    """Run the programs in turn; return the results of those that load, by round."""
    rounds = []
    for _ in range(_ROUNDS):
        results = {}
        for name in ("first", "second", "third", "nothing"):
            time.sleep(gap_s)
            results[name] = programs.run(name)
        rounds.append([results[name] for name in ("first", "second", "third")])
    return rounds


def _recalled_share(results: list[Result]) -> Sample:
    return Sample((100 * statistics.fmean(result["recalled"] for result in results),), "%")


def _private_nbytes(runtime: Path) -> list[float]:
    """Return the private memory of each process of the templates here, but for the templates."""
    found = {pid: stat_of(pid) for pid in pids_with(os.fsencode(runtime), file="cmdline")}
    return [
        float(rollup_nbytes(pid, "Private_"))
        for pid, stat in found.items()
        if stat and stat.parent in found
    ]


SUITE = Suite(
    measures={
        "prepared": measure_prepared,
        "redirect": measure_redirect,
        "first-line": measure_first_line,
        "several": measure_several,
    },
    sources=("sd15-fp32", "sd15-bf16"),
    disk_gb=9,
    shm_gb=6,
    memory_gb=16,
)
