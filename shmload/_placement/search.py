"""The search for the plan that costs least: where components go, and what of them has to wait.

Weights that wait on the host travel to a device each time that they are used. So components that
run once in a generation wait before those that run at every step, with as few bytes as suffice. A
device on which something computes that waits keeps room for the largest module that passes; no
other device does.

How well components fit depends on the order in which they choose their devices, and on how they
choose: the search tries several ways. Where nothing of a component waits, a component lies whole on
one device if it can, since activations pass to another device at every cut; then the search lowers
the level to which devices are filled.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations, product

import msgspec

from shmload._placement.dividing import Divided
from shmload._placement.filling import in_order, in_part
from shmload._placement.spots import Plan, Rooms, Spot, plan_of

Choose = Callable[[Rooms, Rooms], str]
"""Chooses a device for a component that stays whole. It gets the free bytes of the devices that
have room for it, and the size of each, in bytes."""

# Each subset of at most this many components is tried as the ones that wait.
_MAX_SPILLABLE = 8
# The orders of this many components are tried; the others come after them, the largest first.
_MAX_ORDERED = 4
# A level is found to within this share of a device.
_LEVEL_STEP = 2**-14
# So many components are moved at most, to make a plan more even.
_MAX_MOVES = 3
# So many first blocks of a second device are tried; with more the blocks are small.
_MAX_STARTS = 64


class _Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to place components, one after the other."""

    order: tuple[Divided, ...]
    choose: Choose
    reserved: Mapping[str, int]
    """What stays free of some devices for weights that pass, in bytes."""
    main: str = ""
    """The device where blocks compute that no device has room for; empty if none may wait."""

    def follow(self, items: Sequence[Divided], rooms: Rooms, level: float = 1.0) -> Plan | None:
        """Place the components, each device filled up to a share; None if there is no room."""
        free = {d: int(room * level) - self.reserved.get(d, 0) for d, room in rooms.items()}
        spots: dict[int, Spot] = {}
        for item in self.order:
            # At a lower level blocks that are not consecutive would only cost cuts.
            spot = self._put(item, free, rooms, may_scatter=level == 1)
            if spot:
                free = spot.left(free)
                spots[id(item)] = spot
            elif not self.main:
                return None
        waiting = [item for item in items if id(item) not in spots]
        plan = plan_of([*spots.values()], waiting, rooms)
        return plan if plan.cost.fullest <= 1 else None

    def _put(self, item: Divided, free: Rooms, rooms: Rooms, *, may_scatter: bool) -> Spot | None:
        """Place one component: whole, or over as few devices as hold it, or in part."""
        fitting = {device: left for device, left in free.items() if left >= item.nbytes}
        if fitting:
            return Spot.whole(item, self.choose(fitting, rooms))
        by_free = sorted(free, key=lambda device: -free[device])
        for count in range(2, len(free) + 1 if item.blocks else 0):
            chosen = {device: free[device] for device in by_free[:count]}
            if sum(chosen.values()) < item.nbytes:
                continue
            found = list(in_order(item, chosen))
            if not found and may_scatter:
                scattered = (spot for main in chosen for spot in in_part(item, main, chosen))
                found = [spot for spot in scattered if not spot.waiting]
            if found:
                # Devices are full but for the last one: the more is left there, the better.
                return min(found, key=lambda spot: (spot.cuts, -max(spot.left(free).values())))
        if not (self.main and item.component.runs_each_step):
            return None
        # As much as possible, with few cuts.
        ways = in_part(item, self.main, free)
        return min(ways, key=lambda spot: (sum(spot.left(free).values()), spot.cuts), default=None)


def _emptiest(free: Rooms, rooms: Rooms) -> str:
    """Choose the device with the largest free share."""
    return max(free, key=lambda device: free[device] / max(1, rooms[device]))


def _tightest(free: Rooms, rooms: Rooms) -> str:
    """Choose the device with the least left, and keep the others for larger components."""
    return min(free, key=lambda device: free[device])


def search(items: Sequence[Divided], rooms: Rooms) -> Plan | None:
    """Try several plans, and return the one that costs least; None if none fits.

    Args:
        items: the components of a pipeline.
        rooms: what may be used of each device.
    """
    best: Plan | None = None
    for floor, waiting in _choices(items, rooms):
        if best and floor > best.cost[:2]:
            break
        found = None if floor[0] else _pack(items, waiting, rooms)
        plans = [found] if found else _fill(items, waiting, rooms)
        best = min([*plans, *([best] if best else [])], key=lambda plan: plan.rank, default=None)
    return best


def _choices(
    items: Sequence[Divided], rooms: Rooms
) -> list[tuple[tuple[int, int], tuple[Divided, ...]]]:
    """Return the sets of components that may wait whole, the one that may cost least first.

    Returns:
        For each the least that it can cost: bytes at each step, bytes once in a generation.
    """
    once = [item for item in items if not item.component.runs_each_step]
    once = sorted(once, key=lambda item: -item.nbytes)
    lacking = sum(item.nbytes for item in items) - sum(rooms.values())
    found = []
    for count in range(min(len(once), _MAX_SPILLABLE) + 1):
        for waiting in combinations(once[:_MAX_SPILLABLE], count):
            nbytes = sum(item.nbytes for item in waiting)
            step_nbytes = max(0, lacking - nbytes + _leaf_nbytes(waiting))
            found.append(((step_nbytes, nbytes), waiting))
    return sorted(found, key=lambda choice: choice[0])


def _pack(items: Sequence[Divided], waiting: Sequence[Divided], rooms: Rooms) -> Plan | None:
    """Return the best plan in which these components wait, and nothing of the others does."""
    placed = [item for item in items if item not in waiting]
    ways = [
        _Way(order=order, choose=choose, reserved=reserved)
        for _, reserved in _reserves(rooms, _leaf_nbytes(waiting))
        for order in _orders(placed)
        for choose in (_emptiest, _tightest)
    ]
    found = [plan for way in ways if (plan := way.follow(items, rooms))]
    best = min(found, key=lambda plan: plan.rank, default=None)
    if best is None:
        return None
    lowest = sum(item.nbytes for item in placed) / max(1, sum(rooms.values()))
    for way in ways:
        best = _lower(way, items, rooms, best, lowest)
    return _improve(best, rooms)


def _orders(items: Sequence[Divided]) -> Iterator[tuple[Divided, ...]]:
    by_size = sorted(items, key=lambda item: -item.nbytes)
    seen = set()
    for order in permutations(by_size[:_MAX_ORDERED]):
        sizes = tuple((item.rest_nbytes, item.ends) for item in order)
        if sizes not in seen:  # the two transformers of Wan 2.2 are alike
            seen.add(sizes)
            yield (*order, *by_size[_MAX_ORDERED:])


def _lower(way: _Way, items: Sequence[Divided], rooms: Rooms, best: Plan, lowest: float) -> Plan:
    """Return what one way leads to at the lowest level that it reaches, if better than the best."""
    level = best.cost.fullest - _LEVEL_STEP
    while level > lowest:
        found = way.follow(items, rooms, level)
        if found and found.rank < best.rank:
            best = found
        elif level >= best.cost.fullest - _LEVEL_STEP:
            break
        else:
            lowest = level
        level = min((lowest + best.cost.fullest) / 2, best.cost.fullest - _LEVEL_STEP)
    return best


def _fill(items: Sequence[Divided], waiting: Sequence[Divided], rooms: Rooms) -> Iterator[Plan]:
    """Yield plans in which these components wait, and blocks of those that run at every step."""
    step = [item for item in items if item.component.runs_each_step]
    kept = [item for item in items if item not in (*step, *waiting)]
    of_blocks = max((block.leaf_nbytes for item in step for block in item.blocks), default=0)
    passing = sorted({of_blocks, _leaf_nbytes(step)})
    for main, reserved in _reserves(rooms, _leaf_nbytes(waiting), tuple(rooms), passing):
        for order in permutations(step):
            # What may wait whole comes last, and gets what is left.
            all_of_them = (*kept, *order, *waiting)
            way = _Way(order=all_of_them, choose=_tightest, reserved=reserved, main=main)
            if plan := way.follow(items, rooms):
                yield plan


def _reserves(
    rooms: Rooms, nbytes: int, mains: Sequence[str] = ("",), passing: Sequence[int] = (0,)
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield what stays free of devices for weights that pass, in bytes.

    Of devices that are alike one is tried.

    Args:
        rooms: what may be used of each device.
        nbytes: the largest module of components that wait whole.
        mains: the devices where blocks may compute that wait; each is yielded with its reserves.
        passing: the largest module of these blocks; one of these.
    """
    seen = set()
    for main, other, each in product(mains, rooms, passing):
        kind = (rooms.get(main), each, nbytes and (rooms[other], main == other))
        if kind not in seen:
            seen.add(kind)
            reserved = {other: nbytes}
            yield main, reserved | ({main: max(each, reserved.get(main, 0))} if main else {})


def _leaf_nbytes(items: Iterable[Divided]) -> int:
    """Return how many bytes of components that wait come to a device at a time, at most."""
    return max((item.leaf_nbytes for item in items), default=0)


# Making the fullest device emptier, without more cuts --------------------------------------------


def _improve(plan: Plan, rooms: Rooms) -> Plan:
    """Move one whole component after the other to the device where it is best, as long as it helps.

    Args:
        plan: components on devices; of none waits a part.
        rooms: what may be used of each device.

    Returns:
        A plan with no more cuts, in which no device is fuller than the fullest one was.
    """
    plan = _even_out(plan, rooms)
    for _ in range(_MAX_MOVES):
        moved = min(
            (
                _even_out(plan.moved(number, Spot.whole(spot.item, device), rooms), rooms)
                for number, spot in enumerate(plan.spots)
                for device in rooms
                if not spot.cuts and device != spot.main
            ),
            key=lambda each: each.rank,
            default=plan,
        )
        if moved.rank >= plan.rank:
            break
        plan = moved
    return plan


def _even_out(plan: Plan, rooms: Rooms) -> Plan:
    """Move the cuts of components that lie on two devices until the fuller one has the least.

    One component after the other; each keeps its two devices.
    """
    for number, spot in enumerate(plan.spots):
        devices = spot.used
        if len(devices) != 2:
            continue
        free = dict(rooms)
        for other in (*plan.spots[:number], *plan.spots[number + 1 :]):
            free = other.left(free)
        for main in sorted(devices):
            (second,) = devices - {main}
            moved = _most_even(spot.item, main, second, free, rooms)
            plan = min(plan, plan.moved(number, moved, rooms), key=lambda each: each.rank)
    return plan


def _most_even(item: Divided, main: str, second: str, free: Rooms, rooms: Rooms) -> Spot:
    """Divide a component over two devices; the second gets consecutive blocks, wherever they are.

    Args:
        item: the component.
        main: the device that gets all else.
        second: the other device.
        free: what is left of each device without the component.
        rooms: what there is of each.
    """
    ends, count = item.ends, len(item.blocks)
    least = rooms[main] - free[main] + item.nbytes
    taken = rooms[second] - free[second]
    # With this much on the second device both are filled to the same share.
    wanted = (least * rooms[second] - taken * rooms[main]) / max(1, rooms[main] + rooms[second])
    found = []
    for start in range(0, count, 1 + count // _MAX_STARTS):
        end = bisect_right(ends, ends[start] + wanted, start + 1, count + 1)
        for stop in {end - 1, min(end, count)}:
            nbytes = ends[stop] - ends[start]
            share = max(
                (least - nbytes) / max(1, rooms[main]), (taken + nbytes) / max(1, rooms[second])
            )
            found.append((share, stop < count, start, stop))
    _, _, start, stop = min(found)
    return Spot(item, main, ((main, start), (second, stop), (main, count)))
