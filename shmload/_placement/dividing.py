"""Dividing a component over devices: consecutive blocks on each, everything else on one of them.

Blocks are the modules that their library calls indivisible (`_no_split_modules`). The rest,
embeddings and norms that one forward combines, works on one device only.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shmload._placement.device_map import tied_units
from shmload._placement.modules import Component, join

# Steps in the search for the fraction to fill; one step is smaller than any block.
_LEVEL_STEPS = 1 << 12


class Block(msgspec.Struct, frozen=True):
    """One module, or several that share tensors together with all modules between them."""

    paths: tuple[str, ...]
    nbytes: int
    """Size of all, in bytes."""


class Divided(msgspec.Struct, frozen=True, kw_only=True):
    """A component as blocks, which may go to different devices, and the rest, which may not."""

    blocks: tuple[Block, ...]
    """In the order of the component."""
    rest: tuple[str, ...]
    """Paths of all other units."""
    rest_nbytes: int

    def devices(self, main: str, block_devices: Sequence[str]) -> dict[str, str]:
        """Return the device of every unit that has one.

        Args:
            main: the device of the rest.
            block_devices: the devices of the first blocks; the others get none.
        """
        devices = dict.fromkeys(self.rest, main)
        for block, device in zip(self.blocks, block_devices, strict=False):
            devices |= dict.fromkeys(block.paths, device)
        return devices


def divide(component: Component) -> Divided:
    """Return the blocks of a component and the rest; no blocks if it cannot be divided."""
    units = {join(component.name, path): unit for path, unit in component.module.units()}
    ties = [tied_units(component, tie) for tie in component.ties]
    free = {path for path, unit in units.items() if unit.is_whole and len(units) > 1}
    # A module that shares a tensor with the rest belongs to the rest.
    while stuck := {path for tie in ties if not free.issuperset(tie) for path in tie} & free:
        free -= stuck
    order = [path for path in units if path in free]
    spans = [(n, n) for n in range(len(order))]
    for tie in ties:
        if tie[0] in free:
            at = sorted(order.index(path) for path in tie)
            spans.append((at[0], at[-1]))
    blocks = []
    for first, last in _joined(spans):
        inside = order[first : last + 1]
        nbytes = sum(units[path].nbytes for path in inside)
        blocks.append(Block(tuple(inside), nbytes))
    return Divided(
        blocks=tuple(blocks),
        rest=tuple(path for path in units if path not in free),
        rest_nbytes=sum(unit.nbytes for path, unit in units.items() if path not in free),
    )


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans of indices that overlap."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def place_divided(
    component: Component, used: Mapping[str, int], rooms: Mapping[str, int]
) -> dict[str, str] | None:
    """Divide a component over as few devices as hold it, each filled to the same fraction.

    Few, because at every step activations are copied from each device to the next.

    Args:
        component: of the pipeline.
        used: what is used of each device already, in bytes.
        rooms: what may be used of each device at most, in bytes, in the order of the devices.

    Returns:
        The device of every unit, or None if it does not fit.
    """
    divided = divide(component)
    by_free = sorted(rooms, key=lambda device: used[device] - rooms[device])
    for count in range(1, len(rooms) + 1):
        chosen = [device for device in rooms if device in by_free[:count]]
        for main in chosen:
            order = [main, *(device for device in chosen if device != main)]
            found = _assign_evenly(divided, order, used, rooms)
            if found:
                return divided.devices(main, found)
    return None


def _assign_evenly(
    divided: Divided, order: Sequence[str], used: Mapping[str, int], rooms: Mapping[str, int]
) -> list[str] | None:
    """Return the device of each block so that the fullest device is as empty as possible.

    None if they do not fit.
    """
    best = None
    low, high = 0, _LEVEL_STEPS
    while low <= high:
        level = (low + high) // 2
        free = {d: rooms[d] * level // _LEVEL_STEPS - used[d] for d in order}
        found = assign(divided, free)
        if len(found) == len(divided.blocks) and free[order[0]] >= divided.rest_nbytes:
            best, high = found, level - 1
        else:
            low = level + 1
    return best


def assign(divided: Divided, free: Mapping[str, int]) -> list[str]:
    """Fill one device after the other with blocks.

    Returns the devices of the first blocks, up to the first that fits on no remaining device.

    Args:
        divided: the blocks, and the rest, which lies on the first device.
        free: what may still be used of each device, in bytes.
    """
    found: list[str] = []
    devices = iter(free)
    device = next(devices)
    left = free[device] - divided.rest_nbytes
    for block in divided.blocks:
        while block.nbytes > left:
            following = next(devices, None)
            if following is None:
                return found
            device, left = following, free[following]
        left -= block.nbytes
        found.append(device)
    return found
