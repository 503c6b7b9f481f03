"""The best placement of a small pipeline, found by trying every one; written without the planner.

Sizes are whole numbers of bytes. Every unit of a component that runs at every step is tried on each
device, and its blocks on the host; a component may also wait whole. One that runs once lies on
devices with all of its units, or waits whole. All modules outside of the blocks share one place.
"""

from itertools import pairwise, product

import numpy as np

_HOST = -1


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
    if not len(table):
        return None
    count = len(rooms)
    used, passing, homeless = table[:, 3 : 3 + count], table[:, 3 + count : -1].copy(), table[:, -1]
    # What waits whole passes through the emptiest device.
    emptiest = (rooms - used).argmax(axis=1)
    at = np.arange(len(table))
    passing[at, emptiest] = np.maximum(passing[at, emptiest], homeless)
    shares = ((used + passing) / rooms).max(axis=1)
    found = [
        (*row[:3], share)
        for row, share in zip(table.tolist(), shares.tolist(), strict=True)
        if share <= 1
    ]
    return min(found, default=None)


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
