"""`auto` beside the best placement there is, where every one can be tried."""

import random
from itertools import pairwise, product

import numpy as np
import pytest
from placing import UNIT, block, blocks, leaf, limited, model

from shmload._placement.auto import place_auto
from shmload._placement.modules import join, parent_of

# By how much the fullest device may be fuller, and by how much more may travel at each step.
_FULLER, _MORE = 1.03, 1.06
# Of small pipelines, by the number of devices.
_BLOCKS = {1: 10, 2: 7, 3: 5}
_HOST = -1


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
        assert found[:3] == least[:3]
        assert found[3] <= least[3] * _FULLER
    else:
        assert found[0] <= least[0] * _MORE


# Small pipelines ----------------------------------------------------------------------------------


def small_pipeline(seed):
    """Make a pipeline and the sizes of one to three devices, in bytes; the same for a seed.

    The devices hold between half and two and a half of the pipeline's size.
    """
    rng = random.Random(seed)
    count = rng.choice([1, 2, 2, 3])
    size = rng.randint(6, 12)
    other = rng.choice([size, size, rng.randint(3, size)])
    half = _BLOCKS[count] // 2
    sizes = [size] * (_BLOCKS[count] - half) + [other] * half
    in_row = parent_of("blocks", tuple(block(str(n), units) for n, units in enumerate(sizes)))
    encoder = blocks("blocks", rng.randint(1, 2), rng.randint(4, 12))
    pipeline = (
        model("text_encoder", leaf("in", rng.randint(1, 9)), encoder),
        model("transformer", leaf("in", rng.randint(1, 6)), in_row, leaf("out", rng.randint(0, 3))),
        model("vae", leaf("x", rng.randint(1, 6))),
    )
    share = rng.choice([0.5, 0.7, 0.9, 1.1, 1.2, 1.4, 1.7, 2.5]) / count
    total = sum(component.nbytes for component in pipeline)
    factors = rng.choice([(1,), (0.7, 1, 1.4)])
    rooms = [int(total * share * rng.choice(factors)) // UNIT * UNIT for _ in range(count)]
    return pipeline, rooms


# The best placement, found by trying every one; written without the planner -----------------------


def least_cost(pipeline, rooms):
    """Return the least cost that a placement can have, as a tuple of numbers.

    In this order, as the first difference decides: bytes that wait of components that run at every
    step, bytes that wait of the others, cuts, and the share of the fullest device, with what passes
    there. A cut is a place in a forward where activations pass to another device, from the main
    device of the component, which has its rest, over its blocks and back.

    Args:
        pipeline: components without tied tensors, whose blocks stand in a row.
        rooms: sizes of the devices, in bytes.

    Returns:
        The cost; None if nothing fits.
    """
    rooms = np.array(rooms)
    table = None
    for component in pipeline:
        rows = _rows(component, len(rooms))
        table = rows if table is None else _joined(table, rows, len(rooms))
        used, passing = table[:, 3 : 3 + len(rooms)], table[:, 3 + len(rooms) : -1]
        table = table[(used + passing <= rooms).all(axis=1)]
    return min((cost for cost in _costs(table, rooms) if cost[3] <= 1), default=None)


def _costs(table, rooms):
    """Return for each row what the placement costs."""
    count = len(rooms)
    used, passing, homeless = table[:, 3 : 3 + count], table[:, 3 + count : -1].copy(), table[:, -1]
    # What waits whole passes through the emptiest device.
    emptiest = (rooms - used).argmax(axis=1)
    at = np.arange(len(table))
    passing[at, emptiest] = np.maximum(passing[at, emptiest], homeless)
    shares = ((used + passing) / np.maximum(rooms, 1)).max(axis=1)
    return [(*row[:3], share) for row, share in zip(table.tolist(), shares.tolist(), strict=True)]


def _joined(left, right, count):
    """Return a row for every pair: sums, but of what passes the larger."""
    pairs = left[:, None, :], right[None, :, :]
    sums, larger = np.add(*pairs), np.maximum(*pairs)
    both = np.concatenate([sums[..., : 3 + count], larger[..., 3 + count :]], axis=-1)
    return _distinct(both.reshape(-1, both.shape[-1]))


def _distinct(table):
    """Return the rows without those that differ in nothing but more cuts."""
    table = table[np.argsort(table[:, 2], kind="stable")]
    _, first = np.unique(np.delete(table, 2, axis=1), axis=0, return_index=True)
    return table[first]


def _rows(component, count):
    """Return a row for every way to place a component.

    Bytes that wait at each step, bytes that wait once, cuts; by device what lies there, and what
    passes there; and what passes if it waits whole.
    """
    units = [unit for _, unit in component.module.units()]
    blocks = [unit for unit in units if unit.is_whole]
    rest = [unit for unit in units if not unit.is_whole]
    places = [*range(count), _HOST] if component.runs_each_step else range(count)
    ways = [*product(range(count), *[places] * len(blocks)), (_HOST,) * (len(blocks) + 1)]
    found = [_row(component.runs_each_step, rest, blocks, way, count) for way in ways]
    return _distinct(np.array(found))


def _row(runs_each_step, rest, blocks, way, count):
    """Return one row; the first of `way` is the place of the rest, the others those of blocks."""
    placed = [(unit, way[0]) for unit in rest] + list(zip(blocks, way[1:], strict=True))
    used, passing = [0] * count, [0] * count
    leaf = max((u.largest_leaf_nbytes for u, place in placed if place == _HOST), default=0)
    waiting = sum(unit.nbytes for unit, place in placed if place == _HOST)
    for unit, place in placed:
        if place != _HOST:
            used[place] += unit.nbytes
    main = next((place for place in way if place != _HOST), _HOST)
    if main != _HOST:
        passing[main] = leaf
    path = [main, *(main if place == _HOST else place for place in way[1:]), main]
    cuts = sum(before != after for before, after in pairwise(path))
    travelling = (waiting, 0) if runs_each_step else (0, waiting)
    return *travelling, cuts, *used, *passing, leaf if main == _HOST else 0


def cost_of(pipeline, devices, rooms):
    """Return the cost of a placement, as `least_cost`.

    Args:
        pipeline: its components.
        devices: of every unit, by dotted path. What is on none of `rooms` waits.
        rooms: bytes that may be used, by device.
    """
    names, table = list(rooms), None
    for component in pipeline:
        placed = [
            (unit, devices[join(component.name, path)]) for path, unit in component.module.units()
        ]
        placed = [(unit, names.index(at) if at in rooms else _HOST) for unit, at in placed]
        rest = [unit for unit, _ in placed if not unit.is_whole]
        blocks = [unit for unit, _ in placed if unit.is_whole]
        (home,) = {place for unit, place in placed if not unit.is_whole}
        way = (home, *(place for unit, place in placed if unit.is_whole))
        row = np.array([_row(component.runs_each_step, rest, blocks, way, len(rooms))])
        table = row if table is None else _joined(table, row, len(rooms))
    return _costs(table, np.array(list(rooms.values())))[0]
