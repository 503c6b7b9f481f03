"""Where each component is, and how full the devices are then."""

from collections.abc import Mapping, Sequence

import msgspec

from shmload._placement.device_map import Devices
from shmload._placement.dividing import Divided

Rooms = Mapping[str, int]
"""Bytes by device, in the order of the devices: what may be used, or what is free."""


class Spot(msgspec.Struct, frozen=True):
    """Where one component is."""

    item: Divided
    main: str
    """The device of its rest."""
    block_devices: Sequence[str]
    """By block; empty for a block that waits."""

    @property
    def cuts(self) -> int:
        """How often activations pass to another device in one forward."""
        return self.item.cuts(self.main, self.block_devices)

    @property
    def devices(self) -> Devices:
        """The device of every unit that has one."""
        return self.item.devices(self.main, self.block_devices)

    def left(self, free: Rooms) -> dict[str, int]:
        """Return what it leaves of what is free of each device, in bytes."""
        left = dict(free)
        left[self.main] -= self.item.rest_nbytes
        for block, device in zip(self.item.blocks, self.block_devices, strict=True):
            if device:
                left[device] -= block.nbytes
        return left


class Packed(msgspec.Struct, frozen=True):
    """Components on devices, none of which waits."""

    spots: tuple[Spot, ...]
    cuts: int
    """How often activations pass to another device in one forward of each component."""
    fullest: float
    """The largest share of a device that is taken."""

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Of two that place the same components, the one with the smaller rank is the better."""
        return self.fullest > 1, self.cuts, self.fullest


def packed(spots: Sequence[Spot], rooms: Rooms) -> Packed:
    """Return spots with what they cost."""
    free = dict(rooms)
    for spot in spots:
        free = spot.left(free)
    fullest = max(1 - left / max(1, rooms[device]) for device, left in free.items())
    return Packed(tuple(spots), sum(spot.cuts for spot in spots), fullest)
