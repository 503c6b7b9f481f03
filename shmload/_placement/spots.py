"""Where each component is."""

from collections.abc import Iterable, Iterator, Mapping

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
