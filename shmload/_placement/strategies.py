"""The strategies: they choose the device of each component from sizes alone.

The three that diffusers and transformers have place whole components and leave out what does not
fit. `auto` divides a component that fits on no device whole. If that is not enough it offloads
weights to the CPU or the disk: first those of components that run once in a generation, last those
of components that run at every step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from shmload._placement.device_map import Devices
from shmload._placement.dividing import Divided, divide
from shmload._placement.inventory import CPU, DISK, OFFLOAD, Inventory, boundless
from shmload._placement.modules import Component
from shmload._placement.search import search
from shmload._placement.spots import Rooms, devices_of

ComponentDevices = dict[str, str]
"""The device of each component that was placed, by its name."""


def place_sequential(components: Sequence[Component], rooms: Rooms) -> ComponentDevices:
    """Fill one device after the other, in the order of the pipeline."""
    placed: ComponentDevices = {}
    devices = iter(rooms)
    device, left = "", -1
    for component in components:
        while component.nbytes > left:
            device = next(devices, "")
            if not device:
                return placed
            left = rooms[device]
        placed[component.name] = device
        left -= component.nbytes
    return placed


def place_balanced(components: Sequence[Component], rooms: Rooms) -> ComponentDevices:
    """Place the largest first, each on the device whose used fraction is smallest afterwards."""
    used = dict.fromkeys(rooms, 0)
    placed: ComponentDevices = {}
    for component in _largest_first(components):
        after = {device: used[device] + component.nbytes for device in rooms}
        fitting = [device for device in rooms if after[device] <= rooms[device]]
        if fitting:
            device = min(fitting, key=lambda d: after[d] / max(1, rooms[d]))
            placed[component.name] = device
            used[device] = after[device]
    return placed


def place_balanced_low_0(components: Sequence[Component], rooms: Rooms) -> ComponentDevices:
    """Balance over all devices but the first; what does not fit there goes to the first."""
    first, *others = rooms
    placed = place_balanced(components, {d: rooms[d] for d in others})
    left = [component for component in components if component.name not in placed]
    return placed | place_balanced(left, {first: rooms[first]})


WHOLE_STRATEGIES: Mapping[str, Callable[[Sequence[Component], Rooms], ComponentDevices]] = {
    "sequential": place_sequential,
    "balanced": place_balanced,
    "balanced_low_0": place_balanced_low_0,
}


def rooms_of(inventory: Inventory) -> dict[str, int]:
    """Return what a strategy may put on each device that computes, in bytes."""
    devices = inventory.accelerators or (inventory.find(CPU) or boundless(CPU),)
    return {device.name: device.room_nbytes for device in devices}


def place_auto(components: Sequence[Component], inventory: Inventory) -> Devices | None:
    """Place every component, divided or offloaded where necessary.

    Returns:
        The device of every unit, by dotted path; None if there is no room.
    """
    items = [divide(component) for component in _with_core(components)]
    plan = search(items, rooms_of(inventory))
    return plan and _spill(items, devices_of(plan.spots), inventory)


def _spill(items: Sequence[Divided], devices: Devices, inventory: Inventory) -> Devices | None:
    """Have what has no device wait: on the CPU, or else on the disk; None if there is no room.

    Args:
        items: the components of a pipeline.
        devices: of units, by dotted path.
        inventory: its limits of the CPU and the disk count.
    """
    # Without an accelerator the CPU is the device that is full.
    homes = {OFFLOAD: CPU, DISK: DISK} if inventory.accelerators else {DISK: DISK}
    left = {
        target: (inventory.find(home) or boundless(home)).room_nbytes
        for target, home in homes.items()
    }
    for item in sorted(items, key=lambda item: not item.component.runs_each_step):
        for paths, nbytes in _without_device(item, devices):
            target = next((name for name, free in left.items() if nbytes <= free), None)
            if target is None:
                return None
            devices = devices | dict.fromkeys(paths, target)
            left[target] -= nbytes
    return devices


def _without_device(item: Divided, devices: Devices) -> Iterator[tuple[Sequence[str], int]]:
    """Yield the blocks of a component that have no device: their paths and their size, in bytes."""
    blocks = [block for block in item.blocks if block.paths[0] not in devices]
    if len(blocks) < len(item.blocks) or (item.rest and item.rest[0] in devices):
        yield from ((block.paths, block.nbytes) for block in blocks)
    else:  # none has one: one target for the whole component makes a shorter map
        yield [path for block in item.blocks for path in block.paths] + [*item.rest], item.nbytes


def _with_core(components: Sequence[Component]) -> Sequence[Component]:
    """If no component is known to run at every step, assume that the largest one does."""
    if any(component.runs_each_step for component in components):
        return components
    largest = next(iter(_largest_first(components)), None)
    return [msgspec.structs.replace(each, runs_each_step=each is largest) for each in components]


def _largest_first(components: Iterable[Component]) -> list[Component]:
    return sorted(components, key=lambda component: -component.nbytes)
