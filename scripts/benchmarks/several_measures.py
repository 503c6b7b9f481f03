"""Several programs in turn under one template: the figures `several` of `scripts/bench ready`.

Three programs load two pipelines, and a fourth loads nothing. Each program says whether its
pipeline was loaded ahead.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.programs import READY, Programs, programs_of
from benchmarks.samples import Result, Sample

_DTYPE = "bfloat16"
_ROUNDS = 8
_FIRST_ROUNDS = 2
"""Rounds in which programs may still find their pipeline not loaded."""
_GAP_S = 1.0

_LOADS = f"""\
import logging, shmload
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("shmload").addHandler(handler)
logging.getLogger("shmload").setLevel("INFO")
pipeline = shmload.load_pipeline({{source!r}}, dtype="{_DTYPE}", keep=True)
print({READY!r}, flush=True)
print("prepared", int(any("prepared before the program started" in each for each in said)))
# {{name}}
"""
_LOADS_NOTHING = f"print({READY!r}, flush=True)\nprint('prepared 0')\n"
_DIFFUSERS = f"""\
import torch
from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained({{source!r}}, dtype=torch.{_DTYPE})
print({READY!r}, flush=True)
"""


@dataclass(frozen=True, slots=True)
class _Scripts:
    """The programs, by their paths."""

    loading: tuple[str, str, str]
    nothing: str
    diffusers: tuple[str, str]


def measure_several(bench: Bench) -> list[Figure]:
    """With a pause between the runs, against python and `from_pretrained`."""
    with _place(bench) as (programs, scripts):
        rounds = _rounds_of(programs, scripts, _GAP_S)
        waiting = _private_nbytes(programs.runtime)
        plain = [programs.python(script) for script in scripts.diffusers for _ in range(3)]
    bench.evict()
    late = [result for round_ in rounds[_FIRST_ROUNDS:] for result in round_]
    run_s = Sample(tuple(result["wall_s"] for result in late))
    python_s = Sample(tuple(result["wall_s"] for result in plain))
    return [
        Figure(
            name="several-ready",
            what="three programs over two pipelines in turn, 1 s between: runs from the third "
            "round on that find theirs loaded",
            sample=Sample((100 * statistics.fmean(result["prepared"] for result in late),)),
            unit="%",
            target=Target(95, is_least=True),
        ),
        Figure(
            name="several",
            what="the same, the whole process: speed-up over python with from_pretrained",
            sample=Sample((python_s.median / run_s.median,)),
            unit="x",
            target=Target(60, is_least=True),
            beside=(
                Line(label="shmload run", sample=run_s, unit="s"),
                Line(label="python", sample=python_s, unit="s"),
            ),
        ),
        Figure(
            name="several-private",
            what="private memory of the largest process that waits, but for the template",
            sample=Sample((max(waiting, default=0) / 1e6,)),
            unit="MB",
            target=Target(60),
            beside=(
                Line(
                    label="each process that waits",
                    sample=Sample(tuple(each / 1e6 for each in waiting) or (0.0,)),
                    unit="MB",
                ),
            ),
        ),
    ]


def measure_back_to_back(bench: Bench) -> list[Figure]:
    """Without a pause, against the same with `--no-prepare`, each in a place of its own."""
    took = {}
    prepared = 0.0
    for way, options in (("unprepared", ("--no-prepare",)), ("prepared", ())):
        with _place(bench) as (programs, scripts):
            rounds = _rounds_of(programs, scripts, 0.0, *options)
        results = [result for round_ in rounds for result in round_]
        took[way] = Sample(tuple(result["wall_s"] for result in results))
        prepared = statistics.fmean(result["prepared"] for result in results)
    bench.evict()
    total = {way: sum(sample.values) for way, sample in took.items()}
    return [
        Figure(
            name="back-to-back",
            what="the same without a pause, all rounds: time of all runs over that of runs with "
            "--no-prepare",
            sample=Sample((total["prepared"] / total["unprepared"],)),
            unit="x",
            target=Target(1.0),
            beside=tuple(Line(label=way, sample=each, unit="s") for way, each in took.items()),
        ),
        Figure(
            name="back-to-back-ready",
            what="the same: runs that find theirs loaded",
            sample=Sample((100 * prepared,)),
            unit="%",
            target=Target(50, is_least=True),
        ),
    ]


SEVERAL_MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "several": measure_several,
    "back-to-back": measure_back_to_back,
}
"""Measurements by their name for `--only`, in the order of the table."""


def _rounds_of(
    programs: Programs, scripts: _Scripts, gap_s: float, *options: str
) -> list[list[Result]]:
    """Run the programs in turn; return the results of those that load, by round."""
    rounds = []
    for _ in range(_ROUNDS):
        results = []
        for script in (*scripts.loading, scripts.nothing):
            time.sleep(gap_s)
            result = programs.run(*options, script)
            if script != scripts.nothing:
                results.append(result)
        rounds.append(results)
    return rounds


@contextlib.contextmanager
def _place(bench: Bench) -> Iterator[tuple[Programs, _Scripts]]:
    """Yield a starter of programs and the programs.

    The weights of both pipelines are resident, their skeletons are made, and a template serves.
    """
    sources = (bench.sources.fp32, bench.sources.bf16)
    for source in sources:
        bench.processes.probe("warm", source, _DTYPE, None)
    with (
        tempfile.TemporaryDirectory(dir=bench.sources.work, prefix="scripts-") as folder,
        programs_of(bench.processes) as programs,
    ):
        texts = {
            "first.py": _LOADS.format(source=str(sources[0]), name="first"),
            "second.py": _LOADS.format(source=str(sources[1]), name="second"),
            "third.py": _LOADS.format(source=str(sources[0]), name="third"),
            "nothing.py": _LOADS_NOTHING,
            "plain_first.py": _DIFFUSERS.format(source=str(sources[0])),
            "plain_second.py": _DIFFUSERS.format(source=str(sources[1])),
        }
        for name, text in texts.items():
            Path(folder, name).write_text(text)
        first, second, third, nothing, *plain = (f"{folder}/{name}" for name in texts)
        programs.warm_template()
        for script in (first, second):
            programs.run("--no-prepare", script)
        bench.processes.wait_for_skeletons()
        programs.stop_templates()
        programs.warm_template()
        yield programs, _Scripts((first, second, third), nothing, (plain[0], plain[1]))


def _private_nbytes(runtime: Path) -> list[float]:
    """Return the private memory of each process of the templates here, but for the templates."""
    mine = os.fsencode(runtime)
    found: dict[int, tuple[int, float]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            if mine in Path("/proc", entry, "cmdline").read_bytes():
                parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]
                lines = Path("/proc", entry, "smaps_rollup").read_text().splitlines()
                private = sum(int(line.split()[1]) << 10 for line in lines if "Private_" in line)
                found[int(entry)] = (int(parent), private)
    return [nbytes for parent, nbytes in found.values() if parent in found]
