"""Where each component is, and what that costs: of two plans, the cheaper one is the better."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from shmload._placement.device_map import Devices
from shmload._placement.dividing import Divided

Rooms = Mapping[str, int]
"""Bytes by device, in the order of the devices: what may be used, or what is free."""
Run = tuple[str, int]
"""Consecutive blocks: their device, empty if they wait, and the index at which they stop."""


class Spot(msgspec.Struct, frozen=True):
    """Where one component is."""

    item: Divided
    main: str
    """The device of its rest, on which blocks compute that wait."""
    runs: tuple[Run, ...]
    """All blocks, in order; a run may be empty."""

    @classmethod
    def whole(cls, item: Divided, device: str) -> "Spot":
        """Return the spot of a component that is on one device."""
        return cls(item, device, ((device, len(item.blocks)),))

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield each run that is not empty: its device, and where it starts and stops."""
        start = 0
        for device, stop in self.runs:
            if stop > start:
                yield device, start, stop
                start = stop

    @property
    def used(self) -> set[str]:
        """The devices that it is on."""
        return {self.main, *(device for device, _, _ in self.spans() if device)}

    @property
    def cuts(self) -> int:
        """How often activations pass to another device in one forward."""
        gaps = self.item.gaps
        cuts, here = 0, self.main
        for device, start, stop in self.spans():
            there = device or self.main
            if gaps[start + 1] > gaps[start]:  # modules of the rest stand before the first block
                cuts += (here != self.main) + (there != self.main)
            else:
                cuts += here != there
            cuts += 2 * (gaps[stop] - gaps[start + 1]) * (there != self.main)
            here = there
        return cuts + (here != self.main)

    @property
    def waiting(self) -> list[int]:
        """The indices of the blocks that wait."""
        return [at for device, *span in self.spans() if not device for at in range(*span)]

    @property
    def devices(self) -> Devices:
        """The device of every unit that has one."""
        devices = dict.fromkeys(self.item.rest, self.main)
        for device, start, stop in self.spans():
            if device:
                for block in self.item.blocks[start:stop]:
                    devices |= dict.fromkeys(block.paths, device)
        return devices

    def left(self, free: Rooms) -> dict[str, int]:
        """Return what it leaves of what is free of each device, in bytes."""
        left = dict(free)
        left[self.main] -= self.item.rest_nbytes
        for device, start, stop in self.spans():
            if device:
                left[device] -= self.item.ends[stop] - self.item.ends[start]
        return left


def devices_of(spots: Iterable[Spot]) -> Devices:
    """Return the device of every unit that has one."""
    return {path: device for spot in spots for path, device in spot.devices.items()}


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
