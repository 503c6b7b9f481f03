"""What any placement costs, by the device of each unit; written without the planner."""

import itertools
from collections.abc import Iterable, Mapping

from shmload._placement.auto import Cost
from shmload._placement.modules import Component, join


def cost_of(
    components: Iterable[Component], devices: Mapping[str, str], rooms: Mapping[str, int]
) -> Cost:
    """Return the cost of a placement.

    Weights that wait compute on their component's main device, where its first module outside of
    the blocks is; those of a component that waits whole on the emptiest device. There they need
    room for the largest module without children. A forward begins and ends on the main device.

    Args:
        components: of the pipeline.
        devices: of every unit, by dotted path. What is on none of `rooms` waits.
        rooms: bytes that may be used, by device.
    """
    used = dict.fromkeys(rooms, 0)
    passing = dict.fromkeys(rooms, 0)
    step = once = cuts = homeless = 0
    for component in components:
        units = [
            (unit, devices.get(join(component.name, path), ""))
            for path, unit in component.module.units()
        ]
        waiting = [unit for unit, device in units if device not in rooms]
        nbytes = sum(unit.nbytes for unit in waiting)
        leaf_nbytes = max((unit.largest_leaf_nbytes for unit in waiting), default=0)
        step += nbytes * component.runs_each_step
        once += nbytes * (not component.runs_each_step)
        for unit, device in units:
            if device in rooms:
                used[device] += unit.nbytes
        if len(waiting) == len(units):
            homeless = max(homeless, leaf_nbytes)
            continue
        here = [(unit.is_whole, device) for unit, device in units if device in rooms]
        main = min(here, key=lambda each: each[0])[1]
        passing[main] = max(passing[main], leaf_nbytes)
        path = [main, *(d if d in rooms else main for unit, d in units if unit.nbytes), main]
        cuts += sum(before != after for before, after in itertools.pairwise(path))
    emptiest = max(rooms, key=lambda device: rooms[device] - used[device])
    passing[emptiest] = max(passing[emptiest], homeless)
    fullest = max((used[device] + passing[device]) / max(1, rooms[device]) for device in rooms)
    return Cost(step, once, cuts, fullest)
