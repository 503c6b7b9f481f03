"""Plans, and what they cost: of two, the one with the smaller cost is the better."""

from collections.abc import Sequence
from typing import NamedTuple

from shmload._placement.dividing import Divided
from shmload._placement.spots import Rooms, Spot


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
    """The largest share of a device's room that is taken by weights, and by those that pass."""


class Plan(NamedTuple):
    """Where some components are, and what it costs."""

    cost: Cost
    spots: tuple[Spot, ...]
    waiting: tuple[Divided, ...]
    """The components without a spot, which wait whole."""

    @property
    def rank(self) -> tuple[bool, Cost]:
        """Of two plans for the same components, the one with the smaller rank is the better."""
        return self.cost.fullest > 1, self.cost

    def moved(self, number: int, spot: Spot, rooms: Rooms) -> "Plan":
        """Return the same plan but for the spot of one component."""
        return plan_of((*self.spots[:number], spot, *self.spots[number + 1 :]), self.waiting, rooms)


def plan_of(spots: Sequence[Spot], waiting: Sequence[Divided], rooms: Rooms) -> Plan:
    """Return a plan with its cost.

    Blocks that wait compute on their component's main device; a component that waits whole, on the
    emptiest device. There they need room for the largest module without children.

    Args:
        spots: of the components that do not wait whole.
        waiting: the others.
        rooms: bytes that may be used, by device.
    """
    free = dict(rooms)
    passing = dict.fromkeys(rooms, 0)
    travelling = {True: 0, False: 0}
    for spot in spots:
        free = spot.left(free)
        blocks = [spot.item.blocks[at] for at in spot.waiting]
        travelling[spot.item.component.runs_each_step] += sum(block.nbytes for block in blocks)
        largest = max((block.leaf_nbytes for block in blocks), default=0)
        passing[spot.main] = max(passing[spot.main], largest)
    for item in waiting:
        travelling[item.component.runs_each_step] += item.nbytes
    emptiest = max(free, key=lambda device: free[device])
    passing[emptiest] = max(passing[emptiest], *(item.leaf_nbytes for item in waiting), 0)
    fullest = max(1 - (free[d] - passing[d]) / max(1, room) for d, room in rooms.items())
    cuts = sum(spot.cuts for spot in spots)
    return Plan(Cost(travelling[True], travelling[False], cuts, fullest), (*spots,), (*waiting,))
