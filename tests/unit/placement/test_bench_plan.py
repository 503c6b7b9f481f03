"""The suite `plan` of `scripts/bench`: real pipelines, on rigs of the published table."""

import json

import pytest
from benchmarks.plan import Pair, Placed, compare, format_pairs, models_of, pairs_as_json, rank
from benchmarks.published import PIPELINES

from shmload._placement.auto import Cost

# Accelerate warns of the rigs' GPUs, which are not here, and of buffers.
pytestmark = pytest.mark.filterwarnings("ignore")

_GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux-dev", "wan22-a14b", "qwen-image"])
def test_no_placement_is_worse_than_those_of_the_libraries(name):
    for pair in compare(name, rounds=1):
        assert rank(pair.ours.cost) <= rank(pair.theirs.cost)
        assert max(pair.ours.cost.fullest, pair.theirs.cost.fullest) <= 1


@pytest.mark.parametrize("name", PIPELINES)
def test_published_models_have_their_published_sizes(name):
    for component, model in models_of(name).items():
        count = sum(parameter.numel() for parameter in model.parameters())
        assert round(count / 1e6) == PIPELINES[name][component].parameters, component


def _pair(ours, theirs):
    placed = Placed(Cost(*ours), 0.01), Placed(Cost(*theirs), 0.1, "accelerate")
    return Pair("flux", "1x8", 3000, *placed)


def test_report_counts_bytes_at_each_step_before_cuts_and_these_before_shares():
    pairs = [
        _pair((0, 0, 4, 0.9), (_GIB, 0, 2, 0.5)),
        _pair((0, 0, 4, 0.5), (0, 0, 2, 0.9)),
        _pair((0, 9, 2, 0.52), (0, 0, 2, 0.51)),
        _pair((2 * _GIB, 9, 2, 0.51001), (2 * _GIB, 0, 2, 0.51)),
    ]
    assert [pair.verdict for pair in pairs] == ["better", "worse", "worse", "equal"]
    text = format_pairs({"cores": "2"}, pairs)
    assert "of 4 pairs: 1 better, 1 equal, 2 worse" in text
    value = json.loads(json.dumps(pairs_as_json({"cores": "2"}, pairs)))
    assert value["counts"] == {"better": 1, "equal": 1, "worse": 2}
    assert value["pairs"][3]["ours"]["step_nbytes"] == 2 * _GIB
