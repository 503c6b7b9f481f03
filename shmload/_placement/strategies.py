"""The strategies: they choose the device of each component from sizes alone.

The three that diffusers and transformers have place whole components and leave out what does not
fit. `auto` divides a component that fits on no device whole. If that is not enough it offloads
weights to the CPU or the disk: first those of components that run once in a generation, last those
of components that run at every step.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import msgspec

from shmload._placement.device_map import Devices
from shmload._placement.dividing import Divided, assign, divide, place_divided
from shmload._placement.inventory import CPU, DISK, OFFLOAD, Inventory
from shmload._placement.modules import Component, join

Rooms = Mapping[str, int]
"""Bytes by device, in the order of the devices: what may be used, or what is used."""
ComponentDevices = dict[str, str]
"""The device of each component that was placed, by its name."""

# `auto` tries each subset of at most this many components as the ones to offload.
_MAX_SPILLABLE = 8


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


def place_balanced(
    components: Sequence[Component], rooms: Rooms, used: Rooms | None = None
) -> ComponentDevices:
    """Place the largest first, each on the device whose used fraction is smallest afterwards."""
    used = dict(used or dict.fromkeys(rooms, 0))
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
    cpu = inventory.find(CPU)
    alone = {CPU: cpu.room_nbytes if cpu else sys.maxsize}
    return {device.name: device.room_nbytes for device in inventory.accelerators} or alone


def place_auto(components: Sequence[Component], inventory: Inventory) -> Devices | None:
    """Place every component, divided or offloaded where necessary.

    Returns:
        The device of every unit, by dotted path; None if there is no room.
    """
    rooms = rooms_of(inventory)
    components = _with_core(components)
    for spilled in _spillable(components):
        kept = [component for component in components if component not in spilled]
        devices = _place_kept(kept, _less(rooms, _leaf_nbytes(spilled)))
        if devices is not None:
            return _spill(components, devices, inventory)
    return _place_in_part(components, inventory)


def _place_kept(components: Sequence[Component], rooms: Rooms) -> Devices | None:
    """Place components on devices, whole where possible; None if they do not fit."""
    if sum(component.nbytes for component in components) > sum(rooms.values()):
        return None
    too_large = [c for c in components if c.nbytes > max(rooms.values())]
    others = [component for component in components if component not in too_large]
    # Divide the components that are too large first, or last; take what balances better.
    options = [
        _place_after(first, rest, rooms) for first, rest in ((too_large, others), ([], components))
    ]
    found = [devices for devices in options if devices is not None]
    return min(found, key=lambda devices: _fullest(components, devices, rooms), default=None)


def _place_after(
    first: Sequence[Component], others: Sequence[Component], rooms: Rooms
) -> Devices | None:
    """Divide `first`, then balance `others`, then divide what fits on no device whole.

    Returns:
        The device of every unit; None if a component does not fit even divided.
    """
    devices: Devices = {}
    used = dict.fromkeys(rooms, 0)

    def divide_all(components: Sequence[Component]) -> bool:
        for component in _largest_first(components):
            found = place_divided(component, used, rooms)
            if found is None:
                return False
            _add(devices, used, component, found)
        return True

    if not divide_all(first):
        return None
    placed = place_balanced(others, rooms, used)
    for component in others:
        if component.name in placed:
            _add(devices, used, component, _whole(component, placed[component.name]))
    return devices if divide_all([c for c in others if c.name not in placed]) else None


def _place_in_part(components: Sequence[Component], inventory: Inventory) -> Devices | None:
    """Place each component that fits whole, and offload the rest.

    Of a component that runs at every step, place as many blocks as fit.
    """
    rooms = _less(rooms_of(inventory), _leaf_nbytes(components))
    used = dict.fromkeys(rooms, 0)
    devices: Devices = {}
    if min(rooms.values(), default=-1) < 0:
        return None
    by_use = sorted(_largest_first(components), key=lambda component: not component.runs_each_step)
    for component in by_use:
        placed = place_balanced([component], rooms, used)
        if placed:
            _add(devices, used, component, _whole(component, placed[component.name]))
        elif component.runs_each_step:
            _add(devices, used, component, _place_blocks(divide(component), used, rooms))
    return _spill(components, devices, inventory)


def _place_blocks(divided: Divided, used: Rooms, rooms: Rooms) -> Devices:
    """Fill the devices with as many blocks as fit; the others get none."""
    free = {device: rooms[device] - used[device] for device in rooms}
    main = max(free, key=lambda device: free[device])
    if not divided.blocks or divided.rest_nbytes > free[main]:
        return {}
    # Leave out blocks that fit on no device, so that later ones are still placed.
    blocks = tuple(block for block in divided.blocks if block.nbytes <= max(free.values()))
    placeable = msgspec.structs.replace(divided, blocks=blocks)
    block_devices = assign(
        placeable, {main: free[main]} | {d: f for d, f in free.items() if d != main}
    )
    return placeable.devices(main, block_devices)


def _spill(
    components: Sequence[Component], devices: Devices, inventory: Inventory
) -> Devices | None:
    """Offload what has no device: to the CPU, or else to the disk; None if there is no room."""
    left: dict[str, int | None] = {}
    for target, home in ((OFFLOAD, CPU), (DISK, DISK)):
        device = inventory.find(home)
        # Without an accelerator the CPU is the device that is full.
        if target != OFFLOAD or inventory.accelerators:
            left[target] = device.room_nbytes if device else None
    for component in sorted(components, key=lambda component: not component.runs_each_step):
        for paths, nbytes in _without_device(component, devices):
            fitting = [t for t, free in left.items() if free is None or nbytes <= free]
            if not fitting:
                return None
            devices = devices | dict.fromkeys(paths, fitting[0])
            free = left[fitting[0]]
            left[fitting[0]] = None if free is None else free - nbytes
    return devices


def _without_device(
    component: Component, devices: Devices
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the blocks of a component that have no device: their paths and their size, in bytes."""
    divided = divide(component)
    if not divided.rest or divided.rest[0] in devices:
        for block in divided.blocks:
            if block.paths[0] not in devices:
                yield block.paths, block.nbytes
    else:  # none has one: one target for the whole component makes a shorter map
        yield tuple(_whole(component, "")), component.nbytes


def _with_core(components: Sequence[Component]) -> Sequence[Component]:
    """If no component is known to run at every step, assume that the largest one does."""
    if any(component.runs_each_step for component in components):
        return components
    largest = next(iter(_largest_first(components)), None)
    return [msgspec.structs.replace(each, runs_each_step=each is largest) for each in components]


def _spillable(components: Sequence[Component]) -> list[tuple[Component, ...]]:
    """Return the sets of components that may be offloaded whole, smallest size first."""
    candidates = [component for component in components if not component.runs_each_step]
    candidates = _largest_first(candidates)[:_MAX_SPILLABLE]
    sets = [c for n in range(len(candidates) + 1) for c in combinations(candidates, n)]
    return sorted(sets, key=lambda chosen: sum(component.nbytes for component in chosen))


def _largest_first(components: Iterable[Component]) -> list[Component]:
    return sorted(components, key=lambda component: -component.nbytes)


def _leaf_nbytes(components: Iterable[Component]) -> int:
    """Return how many bytes of offloaded weights come to a device at a time, at most."""
    return max((component.module.largest_leaf_nbytes for component in components), default=0)


def _less(rooms: Rooms, nbytes: int) -> dict[str, int]:
    return {device: room - nbytes for device, room in rooms.items()}


def _whole(component: Component, device: str) -> Devices:
    return {join(component.name, path): device for path, _ in component.module.units()}


def _add(devices: Devices, used: dict[str, int], component: Component, found: Devices) -> None:
    devices |= found
    for device, nbytes in nbytes_by_device([component], found).items():
        used[device] += nbytes


def nbytes_by_device(components: Iterable[Component], devices: Devices) -> dict[str, int]:
    """Return the size of the weights on each device, in bytes."""
    used: dict[str, int] = {}
    for component in components:
        for path, module in component.module.units():
            device = devices.get(join(component.name, path))
            if device:
                used[device] = used.get(device, 0) + module.nbytes
    return used


def _fullest(components: Sequence[Component], devices: Devices, rooms: Rooms) -> float:
    used = nbytes_by_device(components, devices)
    return max((nbytes / max(1, rooms[device]) for device, nbytes in used.items()), default=0.0)
