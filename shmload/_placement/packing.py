"""Packing: components onto devices so that nothing waits, with few cuts and no device very full.

A component lies whole on one device where it can, since activations pass from one device to another
at every cut. How well components fit depends on the order in which they choose their devices: the
packing tries the orders of the large ones, and then lowers the level to which devices are filled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations

from shmload._placement.device_map import Devices
from shmload._placement.dividing import Divided, fill_in_order, fill_in_part
from shmload._placement.evening import even_out, improve
from shmload._placement.spots import Packed, Rooms, Spot, packed

Choice = Callable[[Rooms, Rooms], str]
"""Chooses a device for a component that stays whole: from what is free on those that have room for
it, and what there is of each."""

# The orders of this many components are tried; the others come after them, the largest first.
_MAX_ORDERED = 4
# A level is found to within this share of a device.
_LEVEL_STEP = 2**-14


def emptiest(free: Rooms, rooms: Rooms) -> str:
    """Choose the device of which the smallest share is used."""
    return max(free, key=lambda device: free[device] / max(1, rooms[device]))


def tightest(free: Rooms, rooms: Rooms) -> str:
    """Choose the device with the least left, and keep the others for larger components."""
    return min(free, key=lambda device: free[device])


def pack(items: Sequence[Divided], rooms: Rooms) -> Devices | None:
    """Place every component, with the fewest cuts found, and then with the emptiest fullest device.

    Args:
        items: the components.
        rooms: what may be used of each device.

    Returns:
        The device of every unit; None if they do not fit.
    """
    lowest = sum(item.nbytes for item in items) / max(1, sum(rooms.values()))
    if lowest > 1:
        return None
    ways = [(order, choose) for order in _orders(items) for choose in (emptiest, tightest)]
    found = [each for way in ways if (each := _pack_once(*way, rooms, 1.0))]
    best = min(found, key=lambda each: each.rank, default=None)
    if best is None:
        return None
    for way in ways:
        best = _lower(*way, rooms, best, lowest)
    best = improve(best, rooms)
    return {path: device for spot in best.spots for path, device in spot.devices.items()}


def _orders(items: Sequence[Divided]) -> Iterator[tuple[Divided, ...]]:
    by_size = sorted(items, key=lambda item: -item.nbytes)
    seen = set()
    for order in permutations(by_size[:_MAX_ORDERED]):
        sizes = tuple((item.rest_nbytes, item.ends) for item in order)
        if sizes not in seen:  # the two transformers of Wan 2.2 are alike
            seen.add(sizes)
            yield (*order, *by_size[_MAX_ORDERED:])


def _lower(
    order: Sequence[Divided], choose: Choice, rooms: Rooms, best: Packed, lowest: float
) -> Packed:
    """Return what one way leads to at the lowest level that it reaches, if better than the best."""
    level = best.fullest - _LEVEL_STEP
    while level > lowest:
        found = _pack_once(order, choose, rooms, level)
        if found and found.rank < best.rank:
            best = found
        elif level >= best.fullest - _LEVEL_STEP:
            break
        else:
            lowest = level
        level = min((lowest + best.fullest) / 2, best.fullest - _LEVEL_STEP)
    return best


def _pack_once(
    order: Sequence[Divided], choose: Choice, rooms: Rooms, level: float
) -> Packed | None:
    """Place one component after the other, each device filled up to a share; None if one is left.

    A component that fits on no device whole is divided.
    """
    free = {device: int(room * level) for device, room in rooms.items()}
    spots = []
    for item in order:
        spot = put(item, free, rooms, choose)
        if spot is None:
            return None
        free = spot.left(free)
        spots.append(spot)
    return even_out(packed(spots, rooms), rooms)


def put(item: Divided, free: Rooms, rooms: Rooms, choose: Choice) -> Spot | None:
    """Place one component: whole, or else over as few devices as hold it; None if none do."""
    fitting = {device: left for device, left in free.items() if left >= item.nbytes}
    if fitting:
        device = choose(fitting, rooms)
        return Spot(item, device, [device] * len(item.blocks))
    by_free = sorted(free, key=lambda device: -free[device])
    for count in range(2, len(free) + 1 if item.blocks else 0):
        chosen = {device: free[device] for device in by_free[:count]}
        if sum(chosen.values()) >= item.nbytes:
            # Consecutive blocks, or else, at the price of cuts, those that fill the devices best.
            found = list(_in_order(item, chosen)) or [
                spot for spot in in_part(item, chosen, chosen) if all(spot.block_devices)
            ]
            if found:
                # Devices are full but for the last one: the more is left there, the better.
                return min(found, key=lambda spot: (spot.cuts, -max(spot.left(free).values())))
    return None


def _in_order(item: Divided, free: Rooms) -> Iterator[Spot]:
    """Yield the ways to divide a component over devices, one full before the next is used."""
    for main in free:
        for is_reversed in (False, True):
            order = {main: free[main], **free}
            block_devices = fill_in_order(item, order, is_reversed=is_reversed)
            if block_devices:
                yield Spot(item, main, block_devices)


def in_part(item: Divided, free: Rooms, mains: Iterable[str]) -> Iterator[Spot]:
    """Yield the ways to fill devices with as much of a component as they hold.

    Args:
        item: the component.
        free: what may be used of each device.
        mains: the devices that may have its rest.
    """
    for main in mains:
        others = {device: left for device, left in free.items() if device != main}
        for order in ({main: free[main]} | others, others | {main: free[main]}):
            if free[main] >= item.rest_nbytes:
                yield Spot(item, main, fill_in_part(item, main, order))
