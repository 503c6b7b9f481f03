"""Making a placement more even: the fullest device emptier, without more cuts."""

from bisect import bisect_right

from shmload._placement.cost import Plan
from shmload._placement.dividing import Divided
from shmload._placement.spots import Rooms, Spot

# So many components are moved at most.
_MAX_MOVES = 3
# So many first blocks of the second device are tried; with more the blocks are small.
_MAX_STARTS = 64


def improve(plan: Plan, rooms: Rooms) -> Plan:
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
