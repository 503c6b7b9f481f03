"""The strategies that diffusers and transformers have too: they place whole components.

What does not fit they leave out. All decide from sizes alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from shmload._placement.inventory import Rooms
from shmload._placement.modules import Component

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


def place_balanced(components: Iterable[Component], rooms: Rooms) -> ComponentDevices:
    """Place the largest first, each on the device whose used fraction is smallest afterwards."""
    used = dict.fromkeys(rooms, 0)
    placed: ComponentDevices = {}
    for component in sorted(components, key=lambda component: -component.nbytes):
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
    placed = place_balanced(components, {device: rooms[device] for device in others})
    left = (component for component in components if component.name not in placed)
    return placed | place_balanced(left, {first: rooms[first]})


WHOLE_STRATEGIES: Mapping[str, Callable[[Sequence[Component], Rooms], ComponentDevices]] = {
    "sequential": place_sequential,
    "balanced": place_balanced,
    "balanced_low_0": place_balanced_low_0,
}
