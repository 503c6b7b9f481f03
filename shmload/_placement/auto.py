"""`auto`: divides what fits on no device whole, and lets as little as possible wait on the host.

It makes a few hundred attempts and takes the one that costs least. An attempt places one component
after the other:

    fits whole on a device ----> there
    fits on several        ----> divided between its blocks, over as few as hold it
    runs at every step     ----> as many blocks as fit; the others wait
    runs once              ----> waits

Blocks are the modules that their library calls indivisible (`_no_split_modules`). The rest,
embeddings and norms that one forward combines, works on one device only: the main one, which takes
the inputs and returns the outputs. Weights that wait travel to a device each time they are used,
so the device keeps room for the largest module that passes.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shmload._placement.device_map import Devices, tied_units
from shmload._placement.inventory import CPU, OFFLOAD, Inventory, Rooms, boundless
from shmload._placement.modules import Component, join

# The orders of this many components are tried; the others come after them, the largest first.
_MAX_ORDERED = 4
# A level is found to within this share of a device.
_LEVEL_STEP = 2**-12


class Cost(NamedTuple):
    """The price of a placement; the first difference decides between two."""

    step_nbytes: int
    """Bytes that travel from the host to a device at each step of a generation. If a pipeline has
    two transformers that take turns, this counts both."""
    once_nbytes: int
    """Bytes that travel once in a generation: weights of encoders and the like that wait."""
    cuts: int
    """Places in which activations pass to another device, of one forward of each component."""
    fullest: float
    """The largest share of a device's room that its weights and passing weights take."""


class _Block(NamedTuple):
    path: str
    nbytes: int
    leaf_nbytes: int
    """Size of its largest module without children, in bytes: so much of it passes at a time."""


class _Item(NamedTuple):
    """A component as blocks and the rest; without blocks it cannot be divided."""

    nbytes: int
    runs_each_step: bool
    rest: tuple[str, ...]
    """Paths of all units but the blocks."""
    blocks: tuple[_Block, ...]
    leaf_nbytes: int
    """Size of the largest module without children, in bytes."""

    @classmethod
    def of(cls, component: Component) -> "_Item":
        """Divide a component. A block that shares a tensor with another unit is of the rest."""
        units = {join(component.name, path): unit for path, unit in component.module.units()}
        ties = (tied_units(component, tie) for tie in component.ties)
        tied = {path for paths in ties if len(paths) > 1 for path in paths}
        blocks = tuple(
            _Block(path, unit.nbytes, unit.largest_leaf_nbytes)
            for path, unit in units.items()
            if unit.is_whole and path not in tied and len(units) > 1
        )
        rest = tuple(units.keys() - {block.path for block in blocks})
        leaf_nbytes = component.module.largest_leaf_nbytes
        return cls(component.nbytes, component.runs_each_step, rest, blocks, leaf_nbytes)

    @property
    def rest_nbytes(self) -> int:
        return self.nbytes - sum(block.nbytes for block in self.blocks)


class _Spot(NamedTuple):
    """Where one component is."""

    item: _Item
    main: str
    """The device of its rest, on which blocks compute that wait."""
    homes: Devices
    """The devices of its blocks, by path; the others wait."""

    @property
    def waiting(self) -> list[_Block]:
        return [block for block in self.item.blocks if block.path not in self.homes]

    @property
    def waiting_nbytes(self) -> int:
        return sum(block.nbytes for block in self.waiting)

    @property
    def passing_nbytes(self) -> int:
        return max((block.leaf_nbytes for block in self.waiting), default=0)

    @property
    def cuts(self) -> int:
        homes = (self.homes.get(block.path, self.main) for block in self.item.blocks)
        path = [self.main, *homes, self.main]
        return sum(map(operator.ne, path, path[1:]))

    def take(self, free: dict[str, int]) -> None:
        """Take its bytes off what is free of each device."""
        free[self.main] -= self.item.rest_nbytes
        for block in self.item.blocks:
            if block.path in self.homes:
                free[self.homes[block.path]] -= block.nbytes


class _Plan(NamedTuple):
    """What an attempt has led to."""

    cost: Cost
    spots: Sequence[_Spot]
    """The places of all components, without components that wait on the host as a whole."""
    passing_nbytes: int
    """The most that passes of what waits at a time, in bytes."""

    @classmethod
    def of(cls, spots: Sequence[_Spot], waiting: Sequence[_Item], rooms: Rooms) -> "_Plan":
        """Reckon the cost.

        Blocks that wait compute on their component's main device, and a component that waits whole
        on the emptiest device.
        """
        free, passing = dict(rooms), dict.fromkeys(rooms, 0)
        travelling = {True: 0, False: 0}
        for spot in spots:
            spot.take(free)
            passing[spot.main] = max(passing[spot.main], spot.passing_nbytes)
            travelling[True] += spot.waiting_nbytes
        emptiest = max(free, key=lambda device: free[device])
        for item in waiting:
            passing[emptiest] = max(passing[emptiest], item.leaf_nbytes)
            travelling[item.runs_each_step] += item.nbytes
        fullest = max(1 - (free[d] - passing[d]) / max(1, room) for d, room in rooms.items())
        cuts = sum(spot.cuts for spot in spots)
        cost = Cost(travelling[True], travelling[False], cuts, fullest)
        return cls(cost, spots, max(passing.values()))


class _Attempt(NamedTuple):
    """One way to place the components, one after the other."""

    order: tuple[_Item, ...]
    keeping: str
    """The device that keeps room for weights that pass."""

    def run(self, rooms: Rooms, level: float = 1.0, kept_nbytes: int = 0) -> _Plan:
        """Place the components, again until what is kept suffices for the weights that pass.

        Args:
            rooms: what may be used of each device.
            level: to which share of its room each device is filled at most.
            kept_nbytes: what is kept for weights that pass, in bytes.
        """
        free = {device: int(room * level) for device, room in rooms.items()}
        free[self.keeping] -= kept_nbytes
        spots, waiting = [], []
        for item in self.order:
            spot = self._put(item, free, rooms)
            if spot is None:
                waiting.append(item)
                continue
            spot.take(free)
            if spot.main != self.keeping:
                free[spot.main] -= spot.passing_nbytes
            spots.append(spot)
        plan = _Plan.of(spots, waiting, rooms)
        is_enough = plan.passing_nbytes <= kept_nbytes
        return plan if is_enough else self.run(rooms, level, plan.passing_nbytes)

    def _put(self, item: _Item, free: Rooms, rooms: Rooms) -> _Spot | None:
        fitting = [device for device in free if item.nbytes <= free[device]]
        if fitting:
            device = max(fitting, key=lambda device: free[device] / max(1, rooms[device]))
            return _Spot(item, device, {block.path: device for block in item.blocks})
        by_free = sorted(free, key=lambda device: -free[device])
        for count in range(2, len(free) + 1):
            used = {device: free[device] for device in by_free[:count]}
            if sum(used.values()) >= item.nbytes:
                ways = (_divisions(item, main, used) for main in used)
                spots = (next((each for each in way if not each.waiting), None) for way in ways)
                if complete := [spot for spot in spots if spot]:
                    return min(complete, key=lambda spot: spot.cuts)
        if not item.runs_each_step:
            return None
        found = list[_Spot]()
        for main, left in free.items():  # blocks that wait compute there, and need room to pass
            kept = left if main == self.keeping else left - item.leaf_nbytes
            found += _divisions(item, main, {**free, main: kept})
        return min(found, key=lambda spot: (spot.waiting_nbytes, spot.cuts), default=None)


def _divisions(item: _Item, main: str, free: Rooms) -> Iterator[_Spot]:
    """Yield ways to divide a component over devices; what fits nowhere waits.

    Nothing is yielded if the rest does not fit on the main device.
    """
    if free[main] < item.rest_nbytes:
        return
    names = [main, *(device for device in free if device != main)]
    by_size = sorted(item.blocks, key=lambda block: block.nbytes)
    # Consecutive blocks, for few cuts; or else blocks that fill the holes.
    ways = ((item.blocks, False), (item.blocks, True), (by_size, True), (by_size[::-1], True))
    for blocks, goes_back in ways:
        homes, left, at = Devices(), {**free, main: free[main] - item.rest_nbytes}, 0
        for block in blocks:
            devices = names if goes_back else names[at:]
            home = next((device for device in devices if block.nbytes <= left[device]), None)
            if home:
                homes[block.path] = home
                left[home] -= block.nbytes
                at = names.index(home)
        yield _Spot(item, main, homes)


def place_auto(components: Sequence[Component], inventory: Inventory) -> Devices | None:
    """Place every component, divided or offloaded where necessary.

    Returns:
        The device of every unit, by dotted path; None if there is no room.
    """
    items = sorted(map(_Item.of, components), key=lambda item: -item.nbytes)
    if items and not any(item.runs_each_step for item in items):
        items[0] = items[0]._replace(runs_each_step=True)  # what else should a pipeline repeat?
    plan = _cheapest(items, inventory.rooms())
    host = inventory.find(CPU) or boundless(CPU)
    # Without an accelerator the CPU is the device that is full.
    room_nbytes = host.room_nbytes if inventory.accelerators else 0
    if plan is None or plan.cost.step_nbytes + plan.cost.once_nbytes > room_nbytes:
        return None
    devices = Devices()
    for item in items:
        devices |= dict.fromkeys((*item.rest, *(block.path for block in item.blocks)), OFFLOAD)
    for spot in plan.spots:
        devices |= dict.fromkeys(spot.item.rest, spot.main) | spot.homes
    return devices


def _cheapest(items: Sequence[_Item], rooms: Rooms) -> _Plan | None:
    """Return the cheapest plan; None if none fits.

    Args:
        items: the largest first.
        rooms: what may be used of each device.
    """
    orders = itertools.permutations(items[:_MAX_ORDERED])
    kinds = {room: device for device, room in rooms.items()}  # of devices that are alike, one
    ways = [
        _Attempt((*order, *items[_MAX_ORDERED:]), keeping)
        for order, keeping in itertools.product(orders, kinds.values())
    ]
    plans = [way.run(rooms) for way in ways]
    best = min(plans, key=lambda plan: (plan.cost.fullest > 1, plan.cost))
    if best.cost.fullest > 1:
        return None
    for way, plan in zip(ways, plans, strict=True):
        if plan.cost[:3] == best.cost[:3]:
            best = _lower(way, rooms, best)
    return best


def _lower(way: _Attempt, rooms: Rooms, best: _Plan) -> _Plan:
    """Lower the level to which devices are filled, as far as that costs nothing else.

    Args:
        way: leads to the plan.
        rooms: what may be used of each device.
        best: of all plans so far.
    """
    lowest, level = 0.0, best.cost.fullest - _LEVEL_STEP
    while level > lowest:
        found = way.run(rooms, level)
        if found.cost[:3] == best.cost[:3] and found.cost.fullest < best.cost.fullest:
            best = found
        elif not lowest and level + _LEVEL_STEP >= best.cost.fullest:
            break  # most ways lead no lower
        else:
            lowest = level
        level = min((lowest + best.cost.fullest) / 2, best.cost.fullest - _LEVEL_STEP)
    return best
