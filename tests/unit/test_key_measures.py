"""The benchmark of many tensors calculates its figures correctly, shown on easy numbers."""

import pytest
from benchmarks.bench import Bench
from benchmarks.key_measures import measure_tensors
from benchmarks.samples import Rounds
from benchmarks.sources import TENSOR_COUNTS, Sources

# In seconds for each tensor.
EACH = {
    "plan_s": 1e-6,
    "cast_s": 6e-6,
    "same_s": 2e-6,
    "keep_s": 4e-6,
    "attach_s": 3e-6,
    "load_file_s": 12e-6,
}


class FakeBench(Bench):
    def measure(self, ways, *sources, factor=1):
        times = {
            f"{count} {name}": each * count
            for count in TENSOR_COUNTS
            for name, each in EACH.items()
        }
        times["90000 cast_s"] *= 1.2
        return Rounds({"tensors": (times, times)})


class NoProcesses:
    def of(self, program):
        return self

    def probe(self, *arguments):
        raise AssertionError("nothing is run")


def test_sums_and_times_for_each_tensor(tmp_path):
    bench = FakeBench(Sources(tmp_path), NoProcesses(), 2, print)
    figures = {figure.name: figure for figure in measure_tensors(bench)}
    assert {name: figure.sample.median for name, figure in figures.items()} == {
        "tensors-cast": pytest.approx(0.18),
        "tensors-same": pytest.approx(0.06),
        "tensors-linear": pytest.approx(1.2),
        "keys": pytest.approx(0.36),
        "keys-linear": pytest.approx(1),
    }
    assert figures["keys"].line("7,500, each").sample.median == pytest.approx(4)
    assert figures["keys"].line("plan() alone").sample.median == pytest.approx(0.09)
    assert figures["tensors-same"].line("safetensors' load_file").sample.median == pytest.approx(
        0.36
    )
