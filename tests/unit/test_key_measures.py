"""The benchmark of many tensors calculates its figures correctly, shown on easy numbers."""

import pytest
from benchmarks.bench import Bench
from benchmarks.checkpoints import TENSOR_COUNTS
from benchmarks.figures import Rounds
from benchmarks.keys import measure_tensors

# In seconds for each tensor.
EACH = {
    "plan_s": 1e-6,
    "cast_s": 6e-6,
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


def test_sums_and_times_for_each_tensor(tmp_path):
    bench = FakeBench(tmp_path, tmp_path, 2, print)
    figures = {figure.name: figure for figure in measure_tensors(bench)}
    assert {name: figure.sample.median for name, figure in figures.items()} == {
        "tensors-cast": pytest.approx(0.18),
        "tensors-linear": pytest.approx(1.2),
        "keys": pytest.approx(0.36),
        "keys-linear": pytest.approx(1),
    }
    assert figures["keys"].beside["7,500, each"].median == pytest.approx(4)
    assert figures["keys"].beside["plan() alone"].median == pytest.approx(0.09)
    assert figures["tensors-cast"].beside["safetensors' load_file"].median == pytest.approx(0.36)
