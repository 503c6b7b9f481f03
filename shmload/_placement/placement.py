"""A placement: the device of every module of a pipeline, decided from sizes alone.

  device_map ----> a strategy chooses, or its keys are spread ----> limits are checked
 inventory                      |                                        |
components             unknown names, cuts through what          what does not fit: an
                       must stay whole: errors                   error with a map that does

diffusers and transformers have the other strategies too, which place whole components.
"""

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from shmload._placement.auto import place_auto
from shmload._placement.device_map import Devices, expand, merge, parse_device_map, shorten
from shmload._placement.inventory import CPU, OFFLOAD, Inventory, Rooms, boundless
from shmload._placement.modules import Component, Module, join
from shmload._tables import Page, Printable, Table
from shmload._wording import format_nbytes
from shmload.errors import DoesNotFit


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one component has on one device."""

    component: str
    nbytes: int
    """Size of the weights, in bytes."""
    device: str
    """Where the weights are."""


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The weights on one device."""

    device: str
    nbytes: int
    """Size of the weights that are there, in bytes."""
    passing_nbytes: int
    """The most that comes there at a time of weights on `offload`, in bytes."""
    limit_nbytes: int | None
    """How many bytes may lie there at most; None if the inventory has no limit."""


class Placement(Printable, msgspec.Struct, frozen=True, kw_only=True):
    """Where every module of a pipeline is; printed, the tables of `shmload plan`."""

    components: dict[str, str | dict[str, str]]
    """By component: its device, or the device of each of its modules by path, complete and
    disjoint, in order. A path may lead to a tensor that a module holds beside its children."""
    execution_devices: dict[str, str]
    """By component: the device of its inputs, and of modules whose weights are on `offload` when
    they compute."""
    devices: tuple[DeviceUse, ...]
    """Accelerators first, then `cpu`, which includes what is on `offload`."""
    parts: tuple[TableRow, ...]
    """The same as `components`, as the rows of a table for people."""
    device_map: dict[str, str]
    """A short device map that gives this placement again."""

    def page(self) -> Page:
        """Return tables of the modules and of the devices, and the device map as Python code."""
        return placement_page(self.parts, self.execution_devices, self.devices, self.device_map)


def place(components: Sequence[Component], device_map: object, inventory: Inventory) -> Placement:
    """Decide the device of every module of a pipeline; needs neither weights nor devices.

    Args:
        components: of the pipeline, in its order; their names differ.
        device_map: a strategy (`balanced`, `balanced_low_0`, `sequential`: whole components;
            `auto`: divides and spills what does not fit), a device, or a dict of devices by
            component, pattern or dotted path. `offload` keeps weights on the CPU and computes on an
            accelerator, on `cpu` the CPU computes; `meta` means what it means in diffusers.
        inventory: the devices. A strategy leaves the headroom free; a device that the map names may
            be filled.

    Raises:
        UnknownComponent, ArgumentError: the map names a module or a device that does not exist,
            cannot be understood, is incomplete, or divides a module that must stay whole.
        DoesNotFit: a device would hold more than its limit; the message has a map that fits.
    """
    devices = _choose(parse_device_map(device_map, inventory), components, inventory)
    placement = _describe(components, devices, inventory)
    for use in placement.devices:
        needed = use.nbytes + use.passing_nbytes
        if use.limit_nbytes is not None and needed > use.limit_nbytes:
            what = _overfull(use, placement)
            limit = use.limit_nbytes
            raise _too_large(what, use.device, needed, limit, components, inventory)
    return placement


def _choose(
    chosen: str | Devices, components: Sequence[Component], inventory: Inventory
) -> Devices:
    """Return the device of every unit, by the keys of a map or by a strategy.

    Raises:
        DoesNotFit: a strategy finds no device for a component.
    """
    if not isinstance(chosen, str):
        return expand(chosen, components)
    free = dict(inventory.rooms())
    left = list(components)
    if chosen == "auto":
        devices = place_auto(components, inventory)
        if devices is not None:
            return devices
    else:
        placed = WHOLE_STRATEGIES[chosen](components, free)
        left = [component for component in components if component.name not in placed]
        if not left:
            return expand(placed, components)
        for component in components:
            if component.name in placed:
                free[placed[component.name]] -= component.nbytes
    sizes = ", ".join(f"{c.name or 'the model'} ({format_nbytes(c.nbytes)})" for c in left)
    rest = ", ".join(f"{format_nbytes(nbytes)} of {name}" for name, nbytes in free.items())
    what = f"{chosen!r} finds no device for {sizes}; left are {rest}"
    emptiest = max(free, key=lambda device: free[device])
    needed, most = left[0].nbytes, free[emptiest]
    raise _too_large(what, emptiest, needed, most, components, inventory)


def _too_large(
    what: str,
    device: str,
    needed: int,
    available: int,
    components: Sequence[Component],
    inventory: Inventory,
) -> DoesNotFit:
    """Return an error with the device map of `auto`, if that fits."""
    devices = place_auto(components, inventory)
    proposed = None if devices is None else shorten(components, devices)
    remedy = (
        f"'auto' would take device_map={proposed}"
        if proposed
        else "take more or larger devices, a narrower dtype, or allow more of cpu"
    )
    return DoesNotFit(
        f"{what}; {remedy}",
        needed=needed,
        available=available,
        limit=device,
        device_map=proposed,
        errno=errno.ENOMEM,
    )


def _overfull(use: DeviceUse, placement: Placement) -> str:
    """Say what is on a device that holds more than its limit."""
    there = ", ".join(
        f"{row.component or 'the model'} {format_nbytes(row.nbytes)}"
        for row in placement.parts
        if row.device == use.device or (use.device == CPU and row.device == OFFLOAD)
    )
    if use.passing_nbytes:
        there += f", {format_nbytes(use.passing_nbytes)} at a time that wait elsewhere"
    needed = format_nbytes(use.nbytes + use.passing_nbytes)
    return f"{needed} on {use.device} ({there}) exceed its {format_nbytes(use.limit_nbytes or 0)}"


def _describe(components: Sequence[Component], devices: Devices, inventory: Inventory) -> Placement:
    units = {
        each.name: [(unit, devices[join(each.name, path)]) for path, unit in each.module.units()]
        for each in components
    }
    held = {name: Counter[str]() for name in units}
    for name, homes in units.items():
        for unit, home in homes:
            held[name][home] += unit.nbytes
    used = sum(held.values(), Counter[str]())
    free = {device.name: device.nbytes - used[device.name] for device in inventory.accelerators}
    execution = {name: _execution_device(homes, free) for name, homes in units.items()}
    passing: Counter[str] = Counter()
    for name, homes in units.items():
        waiting = (unit.largest_leaf_nbytes for unit, home in homes if home == OFFLOAD)
        # Weights on the CPU that compute there do not move.
        passing[execution[name]] = max(passing[execution[name]], *waiting, 0)
    used[CPU] += used.pop(OFFLOAD, 0)
    others = [boundless(CPU)] if used[CPU] and not inventory.find(CPU) else []
    return Placement(
        components={each.name: _by_module(each, devices) for each in components},
        execution_devices=execution,
        devices=tuple(
            DeviceUse(
                device=device.name,
                nbytes=used[device.name],
                passing_nbytes=passing[device.name],
                limit_nbytes=None if device.is_boundless else device.nbytes,
            )
            for device in (*inventory.devices, *others)
        ),
        parts=tuple(
            TableRow(component=name, nbytes=nbytes, device=device)
            for name, homes in held.items()
            for device, nbytes in homes.items()
        ),
        device_map=shorten(components, devices),
    )


def _by_module(component: Component, devices: Devices) -> str | dict[str, str]:
    """Return the device of a component; of its modules, if it has several."""
    offset = len(component.name) + 1 if component.name else 0
    merged = merge(component.module, component.name, devices).items()
    homes = {path[offset:]: device for path, device in merged}
    return homes.get("", homes)


def _execution_device(units: Sequence[tuple[Module, str]], free: Mapping[str, int]) -> str:
    """Return the device on which a component computes.

    That is the device of its first module that is not a block. If some of its weights are offloaded
    it is an accelerator: the first that has a module of it, or else the one with most room left.

    Args:
        units: of the component, each with its device.
        free: what is left of each accelerator.
    """
    homes = [home for _, home in sorted(units, key=lambda each: each[0].is_whole)]
    computing = [home for home in homes if home != OFFLOAD]
    if len(computing) < len(homes):
        # If there is an accelerator, offloaded weights never compute on the CPU.
        emptiest = max(free, key=lambda device: free[device], default=CPU)
        computing = [home for home in computing if home in free] or [emptiest]
    return computing[0]


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


def placement_page(
    parts: Sequence[TableRow],
    execution: Mapping[str, str],
    devices: Sequence[DeviceUse],
    device_map: Mapping[str, str],
) -> Page:
    """Return the page of a placement; the arguments are its fields."""
    limits = {use.device: use.limit_nbytes for use in devices}
    rows = []
    for part in parts:
        at = f", computes on {execution[part.component]}" * (part.device == OFFLOAD)
        share = _share(part.nbytes, limits.get(CPU if part.device == OFFLOAD else part.device))
        size = format_nbytes(part.nbytes)
        rows.append((part.component or "-", size, f"{part.device}{at}", share))
    uses = [
        (
            use.device,
            format_nbytes(use.nbytes),
            format_nbytes(use.passing_nbytes) if use.passing_nbytes else "-",
            "-" if use.limit_nbytes is None else format_nbytes(use.limit_nbytes),
            _share(use.nbytes + use.passing_nbytes, use.limit_nbytes),
        )
        for use in devices
    ]
    components = Table(titles=("COMPONENT", "SIZE", "DEVICE", "SHARE"), rows=rows, right=(1, 3))
    titles = ("DEVICE", "WEIGHTS", "PASSING", "SIZE", "SHARE")
    held = Table(titles=titles, rows=uses, right=(1, 2, 3, 4))
    return Page((components, "", held, "", print_device_map(device_map)))


def print_device_map(device_map: Mapping[str, str]) -> str:
    """Write a device map as Python code that can be pasted."""
    lines = (f'    "{path}": "{device}",\n' for path, device in device_map.items())
    return f"device_map = {{\n{''.join(lines)}}}"


def _share(nbytes: int, limit: int | None) -> str:
    if not limit:
        return "-"
    share = 100 * nbytes / limit
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"
