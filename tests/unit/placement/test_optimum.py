"""`auto` beside the best placement there is, where every one can be tried."""

import time

import pytest
from benchmarks.cost import cost_of
from best_placement import least_cost
from placing import UNIT, block, blocks, leaf, limited, model
from small_pipelines import small_pipeline

from shmload._placement.auto import place_auto
from shmload._placement.modules import parent_of

# By how much the fullest device may be fuller, and by how much more may travel at each step.
_FULLER, _MORE = 1.03, 1.06


def _cost(pipeline, rooms):
    inventory = limited(*(room / UNIT for room in rooms))
    devices = place_auto(pipeline, inventory)
    return None if devices is None else cost_of(pipeline, devices, inventory.rooms())


@pytest.mark.parametrize("seed", range(60))
def test_auto_is_near_the_optimum(seed):
    """Compare with the placement that costs least of all that `auto` may choose.

    Where all weights fit on the devices: no byte waits, the cuts are as few, and the fullest device
    is at most 3 % fuller. Where some have to wait: at most 6 % more bytes travel at each step. How
    many cuts and which of the components that run once wait is not compared then.
    """
    pipeline, rooms = small_pipeline(seed)
    least, found = least_cost(pipeline, rooms), _cost(pipeline, rooms)
    if least is None:
        assert found is None
    elif least[:2] == (0, 0):
        assert tuple(found[:3]) == least[:3]
        assert found.fullest <= least[3] * _FULLER
    else:
        assert found.step_nbytes <= least[0] * _MORE


@pytest.mark.parametrize("share", [0.4, 1.15])
@pytest.mark.parametrize("count", [1, 8])
def test_plan_of_3000_modules_takes_no_time_to_speak_of(count, share):
    row = parent_of("blocks", tuple(block(str(n), 2 + n % 30) for n in range(700)))
    pipeline = (
        model("text_encoder", leaf("in", 30), blocks("layers", 24, 12)),
        model("text_encoder_2", leaf("in", 30), blocks("layers", 24, 7)),
        model("transformer", leaf("in", 9), row),
        model("transformer_2", leaf("in", 9), parent_of("blocks", row.children[:250])),
        model("vae", leaf("x", 50)),
    )
    room = int(sum(component.nbytes for component in pipeline) * share / count)
    began = time.process_time()
    assert place_auto(pipeline, limited(*[room // UNIT] * count)) is not None
    assert time.process_time() - began < 3
