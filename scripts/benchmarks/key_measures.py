"""Checkpoints of many tensors: the time that each one takes."""

from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.samples import Result, Sample
from benchmarks.sources import TENSOR_COUNTS

_PROBES = Path(__file__).with_name("key_probes.py")


def measure_tensors(bench: Bench) -> list[Figure]:
    """The time per tensor, with tensors too small for their bytes to matter."""
    files = [bench.sources.tensor_file(count) for count in TENSOR_COUNTS]
    ways = {"tensors": partial(bench.processes.of(_PROBES).probe, "tensors", *files)}
    rounds = bench.measure(ways, bench.sources.tensors)
    least, many, most = TENSOR_COUNTS

    def sample(count: int, name: str) -> Sample:
        return rounds.sample("tensors", f"{count} {name}")

    def line(label: str, name: str, count: int = many) -> Line:
        return Line(label=label, sample=sample(count, name), unit="s")

    def attached(count: int) -> Sample:
        return sample(count, "plan_s") + sample(count, "attach_s")

    def lines(values: dict[int, Sample]) -> tuple[Line, ...]:
        """Return the time per tensor for each number of tensors."""
        return tuple(
            Line(label=f"{count:,}, each", sample=value.scaled(1e6 / count), unit="us")
            for count, value in values.items()
        )

    def figure(name: str, dtypes: str, measured: str, *beside: Line) -> Figure:
        return Figure(
            name=name,
            what=f"load_state_dict of {many:,} tensors of 1 KiB, {dtypes}",
            sample=sample(many, measured),
            unit="s",
            target=Target(1),
            beside=(
                *lines({count: sample(count, measured) for count in TENSOR_COUNTS}),
                *beside,
            ),
        )

    def linear(name: str, what: str, few: Sample, more: Sample) -> Figure:
        return Figure(
            name=name,
            what=f"{what}: time per tensor with {most:,} tensors, against {least:,}",
            sample=(more / few).scaled(least / most),
            unit="x",
            target=Target(1.25),
        )

    return [
        figure("tensors-cast", "fp32 to bf16", "cast_s", line("plan() alone", "plan_s")),
        figure(
            "tensors-same",
            "without a cast",
            "same_s",
            line("into a resident segment", "keep_s"),
            line("attach of that segment", "attach_s"),
            line("safetensors' load_file", "load_file_s"),
        ),
        linear("tensors-linear", "the cast", sample(least, "cast_s"), sample(most, "cast_s")),
        Figure(
            name="keys",
            what=f"{most:,} resident tensors: plan, and load_state_dict by their keys",
            sample=attached(most),
            unit="s",
            target=Target(1.5),
            beside=(
                *lines({count: attached(count) for count in TENSOR_COUNTS}),
                line("plan() alone", "plan_s", most),
                line("safetensors' load_file", "load_file_s", most),
            ),
        ),
        linear("keys-linear", "the same", attached(least), attached(most)),
    ]


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
