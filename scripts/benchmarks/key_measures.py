"""Checkpoints of many tensors: the time that each one takes."""

import functools
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.samples import Result, Rounds, Sample
from benchmarks.sources import TENSOR_COUNTS

_PROBES = Path(__file__).with_name("key_probes.py")


def measure_tensors(bench: Bench) -> list[Figure]:
    """The time per tensor, with tensors too small for their bytes to matter."""
    files = [bench.sources.tensor_file(count) for count in TENSOR_COUNTS]
    ways = {"tensors": partial(bench.processes.of(_PROBES).probe, "tensors", *files)}
    timed = _Timed(bench.measure(ways, bench.sources.tensors))
    least, many, most = TENSOR_COUNTS
    cast, same, attached = ("cast_s",), ("same_s",), ("plan_s", "attach_s")
    of_many = f"load_state_dict of {many:,} tensors of 1 KiB"
    return [
        timed.figure(
            "tensors-cast", f"{of_many}, fp32 to bf16", many, cast, 1, {"plan() alone": "plan_s"}
        ),
        timed.figure(
            "tensors-same",
            f"{of_many}, without a cast",
            many,
            same,
            1,
            {
                "into a resident segment": "keep_s",
                "attach of that segment": "attach_s",
                "safetensors' load_file": "load_file_s",
            },
        ),
        timed.linear("tensors-linear", "the cast", least, most, cast),
        timed.figure(
            "keys",
            f"{most:,} resident tensors: plan, and load_state_dict by their keys",
            most,
            attached,
            1.5,
            {"plan() alone": "plan_s", "safetensors' load_file": "load_file_s"},
        ),
        timed.linear("keys-linear", "the same", least, most, attached),
    ]


class _Timed:
    """The times of the probe `tensors`, by their names and the number of tensors.

    Args:
        rounds: of the way `tensors`.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def sum(self, count: int, names: Sequence[str]) -> Sample:
        """Return the sum of some times with a number of tensors, in seconds."""
        found = [self._rounds.sample("tensors", f"{count} {name}") for name in names]
        return functools.reduce(operator.add, found)

    def figure(
        self,
        name: str,
        what: str,
        count: int,
        names: Sequence[str],
        limit_s: float,
        beside: Mapping[str, str],
    ) -> Figure:
        """Return the figure of a sum; beside it the time per tensor for each number of them.

        Args:
            name: of the figure.
            what: its words.
            count: how many tensors.
            names: of the times.
            limit_s: what the sum may be at most, in seconds.
            beside: names of further times, by their words.
        """
        each = (
            Line(label=f"{n:,}, each", sample=self.sum(n, names).scaled(1e6 / n), unit="us")
            for n in TENSOR_COUNTS
        )
        others = (
            Line(label=label, sample=self.sum(count, (other,)), unit="s")
            for label, other in beside.items()
        )
        return Figure(
            name=name,
            what=what,
            sample=self.sum(count, names),
            unit="s",
            target=Target(limit_s),
            beside=(*each, *others),
        )

    def linear(self, name: str, what: str, few: int, many: int, names: Sequence[str]) -> Figure:
        """Return the time per tensor with many tensors, as a multiple of that with few."""
        ratio = self.sum(many, names) / self.sum(few, names)
        return Figure(
            name=name,
            what=f"{what}: time per tensor with {many:,} tensors, against {few:,}",
            sample=ratio.scaled(few / many),
            unit="x",
            target=Target(1.25),
        )


def measure_keys(bench: Bench) -> list[Figure]:
    """`load_model` of a resident model with as many keys as the largest models have."""
    small = bench.sources.flux_small / "transformer"
    source = bench.sources.keys / "transformer"

    def load(way: str, **variables: str) -> Result:
        probe = bench.processes.of(_PROBES).probe
        return probe("model", way, small, source, **variables)

    ways = {
        "shmload": partial(load, "shmload", SHMLOAD_SKELETONS="1"),
        "without": partial(load, "shmload"),
        "diffusers": partial(load, "diffusers"),
    }
    count = int(ways["shmload"]()["keys"])  # the first load asks for the skeleton
    bench.processes.wait_for_skeletons()
    rounds = bench.measure(ways, source)
    bench.evict()
    calls = {way: rounds.sample(way, "call_s") for way in ways}
    return [
        Figure(
            name="keys-model",
            what=f"load_model of a resident model with {count:,} keys",
            sample=calls["shmload"],
            unit="s",
            target=Target(1.5),
            beside=(
                Line(
                    label="speed-up over from_pretrained",
                    sample=calls["diffusers"] / calls["shmload"],
                    unit="x",
                ),
                Line(label="shmload, with SHMLOAD_SKELETONS=0", sample=calls["without"], unit="s"),
                Line(label="diffusers", sample=calls["diffusers"], unit="s"),
            ),
        )
    ]
