"""Packing: components onto devices so that nothing waits, with few cuts and no device very full.

A component lies whole on one device where it can, since activations pass from one device to another
at every cut. How well components fit depends on the order in which they choose their devices: the
packing tries the orders of the large ones, and then lowers the level to which devices are filled.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from shmload._placement.dividing import Divided
from shmload._placement.evening import even_out, improve
from shmload._placement.filling import in_order, in_part
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


def pack(items: Sequence[Divided], rooms: Rooms) -> tuple[Spot, ...] | None:
    """Place every component, with the fewest cuts found, and then with the emptiest fullest device.

    Args:
        items: the components.
        rooms: what may be used of each device.

    Returns:
        The spot of each; None if they do not fit.
    """
    lowest = sum(item.nbytes for item in items) / max(1, sum(rooms.values()))
    if lowest > 1:
        return None
    ways = [(order, choose) for order in _orders(items) for choose in (emptiest, tightest)]
    found = [each for way in ways if (each := _pack_once(*way, rooms))] or [
        each for way in ways if (each := _pack_once(*way, rooms, may_scatter=True))
    ]
    best = min(found, key=lambda each: each.rank, default=None)
    if best is None:
        return None
    for way in ways:
        best = _lower(*way, rooms, best, lowest)
    return improve(best, rooms).spots


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
    order: Sequence[Divided],
    choose: Choice,
    rooms: Rooms,
    level: float = 1.0,
    *,
    may_scatter: bool = False,
) -> Packed | None:
    """Place one component after the other, each device filled up to a share; None if one is left.

    A component that fits on no device whole is divided.
    """
    free = {device: int(room * level) for device, room in rooms.items()}
    spots = []
    for item in order:
        spot = put(item, free, rooms, choose, may_scatter=may_scatter)
        if spot is None:
            return None
        free = spot.left(free)
        spots.append(spot)
    return even_out(packed(spots, rooms), rooms)


def put(
    item: Divided, free: Rooms, rooms: Rooms, choose: Choice, *, may_scatter: bool
) -> Spot | None:
    """Place one component: whole, or else over as few devices as hold it; None if none do.

    Args:
        item: the component.
        free: what is left of each device.
        rooms: what there is of each.
        choose: chooses the device of one that fits whole.
        may_scatter: whether a device may get blocks that are not consecutive, at the price of cuts.
    """
    fitting = {device: left for device, left in free.items() if left >= item.nbytes}
    if fitting:
        device = choose(fitting, rooms)
        return Spot(item, device, ((device, len(item.blocks)),))
    by_free = sorted(free, key=lambda device: -free[device])
    for count in range(2, len(free) + 1 if item.blocks else 0):
        chosen = {device: free[device] for device in by_free[:count]}
        if sum(chosen.values()) >= item.nbytes:
            found = list(in_order(item, chosen))
            if not found and may_scatter:
                ways = (spot for main in chosen for spot in in_part(item, main, chosen))
                found = [spot for spot in ways if not spot.waiting]
            if found:
                # Devices are full but for the last one: the more is left there, the better.
                return min(found, key=lambda spot: (spot.cuts, -max(spot.left(free).values())))
    return None
