"""The suite `plan` of `scripts/bench`: real pipelines, on the rigs where `auto` was once worse."""

import json

import pytest
from benchmarks.plan import Pair, Placed, compare, format_pairs, models_of, pairs_as_json, rank
from benchmarks.published import PIPELINES

from shmload._placement.spots import Cost

# Accelerate warns of the rigs' GPUs, which are not here, and of buffers.
pytestmark = pytest.mark.filterwarnings("ignore")

_GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rigs"),
    [
        ("flux-dev", ["2x24"]),
        ("wan21-14b", ["2x24"]),
        ("wan22-a14b", ["2x24", "4x24"]),
        ("hunyuan-video", ["2x24"]),
    ],
)
def test_no_placement_is_worse_than_those_of_the_libraries(name, rigs):
    pairs = list(compare(name, rounds=1, rigs=rigs))
    assert [pair.rig for pair in pairs] == rigs
    for pair in pairs:
        assert rank(pair.ours.cost) <= rank(pair.theirs.cost)
        assert pair.theirs.cost.fullest <= 1


@pytest.mark.parametrize("name", PIPELINES)
def test_published_models_have_their_published_sizes(name):
    for component, model in models_of(name).items():
        count = sum(parameter.numel() for parameter in model.parameters())
        assert round(count / 1e6) == PIPELINES[name][component].parameters, component


def _pair(ours, theirs):
    return Pair(
        "flux", "1x8", 3000, Placed(Cost(*ours), 0.01), Placed(Cost(*theirs), 0.1, "accelerate")
    )


def test_bytes_at_each_step_count_before_cuts_and_these_before_shares():
    assert _pair((0, 0, 4, 0.9), (_GIB, 0, 2, 0.5)).verdict == "better"
    assert _pair((0, 0, 4, 0.5), (0, 0, 2, 0.9)).verdict == "worse"
    assert _pair((0, 9, 2, 0.52), (0, 0, 2, 0.51)).verdict == "worse"
    assert _pair((0, 9, 2, 0.51001), (0, 0, 2, 0.51)).verdict == "equal"


def test_report_has_a_row_for_each_pair_and_the_counts():
    pairs = [_pair((0, 0, 0, 0.5), (0, 0, 2, 0.4)), _pair((2 * _GIB, 0, 0, 1), (0, 0, 0, 1))]
    text = format_pairs({"cores": "2"}, pairs)
    assert "of 2 pairs: 1 better, 0 equal, 1 worse" in text
    assert "2.00" in text
    value = json.loads(json.dumps(pairs_as_json({"cores": "2"}, pairs)))
    assert value["counts"] == {"better": 1, "equal": 0, "worse": 1}
    assert value["pairs"][1]["ours"]["step_nbytes"] == 2 * _GIB
