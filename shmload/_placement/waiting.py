"""What waits on the host when the devices do not hold everything, and where it waits.

Weights that wait travel to a device each time that they are used. So components that run once in a
generation wait before those that run at every step, with as few bytes as suffice. A device on which
something computes that waits keeps room for the largest module that passes; no other device does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations, product

import msgspec

from shmload._placement.cost import Cost
from shmload._placement.device_map import Devices
from shmload._placement.dividing import Divided, divide
from shmload._placement.filling import in_part
from shmload._placement.inventory import CPU, DISK, OFFLOAD, Inventory
from shmload._placement.modules import Component, Module
from shmload._placement.packing import pack, put, tightest
from shmload._placement.spots import Rooms, Spot

# Each subset of at most this many components is tried as the ones that wait.
_MAX_SPILLABLE = 8


class _Choice(msgspec.Struct, frozen=True):
    """Which of the components that run once lie on devices."""

    kept: tuple[Divided, ...]
    waiting: tuple[Divided, ...]
    step_nbytes: int
    """At least so many bytes of what runs at every step have to wait then."""

    @property
    def floor(self) -> tuple[int, int]:
        """The least that it can cost: bytes at each step, bytes once in a generation."""
        return self.step_nbytes, sum(item.nbytes for item in self.waiting)


def keep_most(items: Sequence[Divided], rooms: Rooms) -> tuple[Spot, ...] | None:
    """Place components of which some have to wait.

    Args:
        items: the components of a pipeline.
        rooms: what may be used of each device.

    Returns:
        The spots of those that do not wait whole; None if there is no room for weights to pass.
    """
    step = [item for item in items if item.component.runs_each_step]
    best: tuple[Cost, tuple[Spot, ...]] | None = None
    for choice in _choices(items, rooms):
        if best and choice.floor > best[0][:2]:
            break
        for spots in _place(step, choice, rooms):
            cost = _cost_of(items, spots, rooms)
            if cost.fullest <= 1 and (best is None or cost < best[0]):
                best = cost, spots
    return best and best[1]


def _cost_of(items: Sequence[Divided], spots: Sequence[Spot], rooms: Rooms) -> Cost:
    """Return what `cost_of` returns, in a time that does not grow with the number of modules."""
    free = dict(rooms)
    passing = dict.fromkeys(rooms, 0)
    waiting = {True: 0, False: 0}
    for spot in spots:
        free = spot.left(free)
        blocks = [spot.item.blocks[at] for at in spot.waiting]
        waiting[spot.item.component.runs_each_step] += sum(block.nbytes for block in blocks)
        largest = max((block.leaf_nbytes for block in blocks), default=0)
        passing[spot.main] = max(passing[spot.main], largest)
    placed = [spot.item for spot in spots]
    homeless = [item for item in items if item not in placed]
    for item in homeless:
        waiting[item.component.runs_each_step] += item.nbytes
    emptiest = max(free, key=lambda device: free[device])
    passing[emptiest] = max(passing[emptiest], _leaf_nbytes(homeless))
    fullest = max(1 - (free[d] - passing[d]) / max(1, room) for d, room in rooms.items())
    return Cost(waiting[True], waiting[False], sum(spot.cuts for spot in spots), fullest)


def _choices(items: Sequence[Divided], rooms: Rooms) -> list[_Choice]:
    """Return the sets of components that may wait whole, the one that may cost least first."""
    once = [item for item in items if not item.component.runs_each_step]
    once = sorted(once, key=lambda item: -item.nbytes)
    step_nbytes = sum(item.nbytes for item in items if item.component.runs_each_step)
    found = []
    for count in range(min(len(once), _MAX_SPILLABLE) + 1):
        for waiting in combinations(once[:_MAX_SPILLABLE], count):
            kept = tuple(item for item in once if item not in waiting)
            free = sum(rooms.values()) - sum(item.nbytes for item in kept) - _leaf_nbytes(waiting)
            found.append(_Choice(kept, waiting, max(0, step_nbytes - free)))
    return sorted(found, key=lambda choice: choice.floor)


def _place(step: Sequence[Divided], choice: _Choice, rooms: Rooms) -> Iterator[tuple[Spot, ...]]:
    """Yield placements in which these components wait, and as little else as possible."""
    leaf_nbytes = _leaf_nbytes(choice.waiting)
    if not choice.step_nbytes:
        reserve = _reserve(leaf_nbytes)
        spots = pack([*step, *choice.kept, reserve], rooms)
        if spots is not None:
            yield tuple(spot for spot in spots if spot.item is not reserve)
            return
    blocks = [max((b.leaf_nbytes for b in item.blocks), default=0) for item in step]
    whole = [item.component.module.largest_leaf_nbytes for item in step]
    for reserved in _reserves(leaf_nbytes, sorted({max(blocks), max(whole)}), rooms):
        for order in permutations(step):
            yield _fill([*choice.kept, *order, *choice.waiting], rooms, *reserved)


def _reserves(
    once_nbytes: int, each_step: Iterable[int], rooms: Rooms
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield a main device for what waits in part, with the bytes that stay free by device.

    Args:
        once_nbytes: the largest module that passes of components that run once.
        each_step: the same of those that run at every step; one of these.
        rooms: what may be used of each device. Of devices that are alike one is tried.
    """
    seen = set()
    for main, other, nbytes in product(rooms, rooms, each_step):
        kind = rooms[main], rooms[other], main == other, nbytes
        if kind not in seen:
            seen.add(kind)
            yield main, {other: once_nbytes} | {main: max(nbytes, once_nbytes * (main == other))}


def _fill(
    order: Sequence[Divided], rooms: Rooms, main: str, reserved: Mapping[str, int]
) -> tuple[Spot, ...]:
    """Place one component after the other, as long as they fit.

    Of a component that runs at every step, place as many blocks as fit, and the rest on `main`.

    Args:
        order: the components.
        rooms: what may be used of each device.
        main: where the rest of what waits in part is.
        reserved: what stays free of some devices, in bytes.
    """
    free = {device: room - reserved.get(device, 0) for device, room in rooms.items()}
    spots = []
    for item in order:
        spot = put(item, free, rooms, tightest, may_scatter=True)
        if not spot and item.component.runs_each_step:
            # As much as possible, with few cuts.
            ways = in_part(item, main, free)
            spot = min(ways, key=lambda way: (sum(way.left(free).values()), way.cuts), default=None)
        if spot:
            free = spot.left(free)
            spots.append(spot)
    return tuple(spots)


def _leaf_nbytes(items: Sequence[Divided]) -> int:
    """Return how many bytes of components that wait come to a device at a time, at most."""
    return max((item.component.module.largest_leaf_nbytes for item in items), default=0)


def _reserve(nbytes: int) -> Divided:
    """Return a component that stands for room that is kept free."""
    return divide(Component(name="", module=Module(name="", nbytes=nbytes)))


def spill(items: Sequence[Divided], devices: Devices, inventory: Inventory) -> Devices | None:
    """Have what has no device wait: on the CPU, or else on the disk; None if there is no room.

    Args:
        items: the components of a pipeline.
        devices: of units, by dotted path.
        inventory: its limits of the CPU and the disk count.
    """
    left: dict[str, int | None] = {}
    for target, home in ((OFFLOAD, CPU), (DISK, DISK)):
        device = inventory.find(home)
        # Without an accelerator the CPU is the device that is full.
        if target != OFFLOAD or inventory.accelerators:
            left[target] = device.room_nbytes if device else None
    for item in sorted(items, key=lambda item: not item.component.runs_each_step):
        for paths, nbytes in _without_device(item, devices):
            fitting = [t for t, free in left.items() if free is None or nbytes <= free]
            if not fitting:
                return None
            devices = devices | dict.fromkeys(paths, fitting[0])
            free = left[fitting[0]]
            left[fitting[0]] = None if free is None else free - nbytes
    return devices


def _without_device(item: Divided, devices: Devices) -> Iterator[tuple[Sequence[str], int]]:
    """Yield the blocks of a component that have no device: their paths and their size, in bytes."""
    blocks = [block for block in item.blocks if block.paths[0] not in devices]
    if len(blocks) < len(item.blocks) or (item.rest and item.rest[0] in devices):
        yield from ((block.paths, block.nbytes) for block in blocks)
    else:  # none has one: one target for the whole component makes a shorter map
        yield [path for block in item.blocks for path in block.paths] + [*item.rest], item.nbytes
