"""The benchmark of finished pipelines calculates its figures correctly, shown on easy numbers."""

import pytest
from benchmarks.bench import Bench
from benchmarks.figures import Rounds

from benchmarks import switch

MB = 1_000_000
FOUND = {
    "call_s": 0.5,
    "switch_s": 0.5,
    "update_s": 0.05,
    "wall_s": 4.0,
    "weights_nbytes": 1000 * MB,
    "private_nbytes": 5 * MB,
    "changed_nbytes": 100 * MB,
    "written_nbytes": 101 * MB,
    "copied_nbytes": 3 * MB,
    "publish_s": 0.3,
    "held_nbytes": 500 * MB,
    "union_nbytes": 500 * MB,
}


class FakeBench(Bench):
    """The first way takes the times above, and each further one twice as long."""

    def measure(self, ways, *sources):
        found = {}
        for number, way in enumerate(ways):
            slower = {k: v * (1 + number) for k, v in FOUND.items() if k.endswith("_s")}
            found[way] = (FOUND | slower,) * 2
        return Rounds(found)

    def ask(self, function, /, *arguments, prefix=(), **variables):
        return FOUND


@pytest.mark.parametrize(
    ("measure", "wanted"),
    [
        (switch.measure_publish, {"publish": 1.01}),
        (
            switch.measure_attach,
            {"attach-published": 0.5, "attach-copied": 3, "attach-memory": 0.5},
        ),
        (
            switch.measure_style,
            {"style": 3, "style-mix": 1.5, "style-copied": 3, "style-memory": 0.5},
        ),
        (switch.measure_mix, {"mix": 1 / 3}),
        (switch.measure_models, {"models": 2, "models-time": 0.5, "models-union": 1}),
        (switch.measure_update, {"update": 0.05, "update-written": 1.06}),
    ],
)
def test_figures_are_the_ratios_that_they_say(measure, wanted, tmp_path):
    figures = measure(FakeBench(tmp_path, tmp_path, 2, print))
    found = {figure.name: figure.sample.median for figure in figures}
    assert found == {name: pytest.approx(value) for name, value in wanted.items()}
