"""A placement: the device of every module of a pipeline, decided from sizes alone.

  device_map ----> a strategy chooses, or its keys are spread ----> limits are checked
 inventory                      |                                        |
components             unknown names, cuts through what          what does not fit: an
                       must stay whole: errors                   error with a map that does
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from shmload._placement.device_map import Devices, expand, merge, parse_device_map
from shmload._placement.inventory import CPU, DISK, OFFLOAD, Inventory, boundless
from shmload._placement.modules import Component, Module, join
from shmload._placement.offloading import OffloadingUse, offloading_uses
from shmload._placement.shortest_map import shorten
from shmload._placement.strategies import WHOLE_STRATEGIES, place_auto, rooms_of
from shmload._placement.table import WAITING, DeviceUse, TableRow, placement_page, table_rows
from shmload._tables import Page, Printable
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError, DoesNotFit


class Placement(Printable, msgspec.Struct, frozen=True, kw_only=True):
    """Where every module of a pipeline is; printed, the tables of `shmload plan`."""

    components: dict[str, str | dict[str, str]]
    """By component: its device, or the device of each of its modules by path, complete and
    disjoint, in order. A path may lead to a tensor that a module holds beside its children."""
    execution_devices: dict[str, str]
    """By component: the device of its inputs, and of modules whose weights are on `offload` or
    `disk` when they compute."""
    devices: tuple[DeviceUse, ...]
    """Accelerators first, then `cpu`, which includes what is on `offload`, then `disk`."""
    parts: tuple[TableRow, ...]
    """The same as `components`, as the rows of a table for people."""
    device_map: dict[str, str]
    """The shortest device map that gives this placement again."""
    offloading: tuple[OffloadingUse, ...]
    """What the libraries' offloading calls keep on a device, if one of them places the pipeline
    instead."""

    def page(self) -> Page:
        """Return tables of the modules and of the devices, and the device map as Python code."""
        return placement_page(self.parts, self.devices, self.device_map, self.offloading)


def place(components: Sequence[Component], device_map: object, inventory: Inventory) -> Placement:
    """Decide the device of every module of a pipeline; needs neither weights nor devices.

    Args:
        components: of the pipeline, in its order; their names differ.
        device_map: a strategy (`balanced`, `balanced_low_0`, `sequential`: whole components;
            `auto`: divides and spills what does not fit), a device, or a dict of devices by
            component, pattern or dotted path. `offload` keeps weights on the CPU and computes on an
            accelerator, on `cpu` the CPU computes; `disk` and `meta` mean what they mean in
            diffusers.
        inventory: the devices. A strategy leaves the headroom free; a device that the map names may
            be filled.

    Raises:
        UnknownComponent, ArgumentError: the map names a module that does not exist.
        ArgumentError: the map cannot be understood, is incomplete, or divides a module that
            must stay whole.
        ArgumentError: the map names a device that is not there.
        DoesNotFit: a device would hold more than its limit; the message has a map that fits.
    """
    chosen = parse_device_map(device_map, inventory)
    if isinstance(chosen, str):
        devices = _choose(chosen, components, inventory)
    else:
        devices = expand(chosen, components)
    placement = _describe(components, devices, inventory)
    _require_limits(placement, components, inventory)
    return placement


def _choose(strategy: str, components: Sequence[Component], inventory: Inventory) -> Devices:
    """Let a strategy choose the device of every unit.

    Raises:
        DoesNotFit: it finds no device for a component.
    """
    rooms = rooms_of(inventory)
    if strategy == "auto":
        devices = place_auto(components, inventory)
        if devices is None:
            needed = sum(component.nbytes for component in components)
            sizes = ", ".join(map(_with_size, components))
            what = f"{sizes} do not fit on {_amounts(inventory)}, not even divided"
            raise DoesNotFit(needed, sum(rooms.values()), "all devices", what, _MORE)
        return devices
    placed = WHOLE_STRATEGIES[strategy](components, rooms)
    left = [component for component in components if component.name not in placed]
    if not left:
        return expand(dict(placed), components)
    used = dict.fromkeys(rooms, 0)
    for component in components:
        if component.name in placed:
            used[placed[component.name]] += component.nbytes
    free = {device: room - used[device] for device, room in rooms.items()}
    emptiest = max(free, key=lambda device: free[device])
    what = f"{strategy!r} finds no device for {', '.join(map(_with_size, left))}: " + ", ".join(
        f"{d} has {format_nbytes(n)} of {format_nbytes(rooms[d])} left" for d, n in free.items()
    )
    raise _misfit(left[0].nbytes, free[emptiest], emptiest, what, components, inventory)


_MORE = (
    "take more or larger devices, a narrower dtype (bfloat16 is half of float32), or allow more of "
    "cpu or disk"
)


def _misfit(
    needed: int,
    available: int,
    device: str,
    what: str,
    components: Sequence[Component],
    inventory: Inventory,
) -> DoesNotFit:
    """Return an error with the device map of `auto`, if that fits."""
    devices = place_auto(components, inventory)
    if devices is None:
        return DoesNotFit(needed, available, device, what, _MORE)
    proposed = _describe(components, devices, inventory).device_map
    return DoesNotFit(needed, available, device, what, "'auto' would take", proposed)


def _with_size(component: Component) -> str:
    return f"{component.name or 'the model'} ({format_nbytes(component.nbytes)})"


def _amounts(inventory: Inventory) -> str:
    return ", ".join(f"{d.name} ({format_nbytes(d.room_nbytes)})" for d in inventory.devices)


def _describe(components: Sequence[Component], devices: Devices, inventory: Inventory) -> Placement:
    units = {
        each.name: [(unit, devices[join(each.name, path)]) for path, unit in each.module.units()]
        for each in components
    }
    used: Counter[str] = Counter()
    for unit, home in itertools.chain(*units.values()):
        used[home] += unit.nbytes
    free = {device.name: device.nbytes - used[device.name] for device in inventory.accelerators}
    execution = {name: _execution_device(homes, free) for name, homes in units.items()}
    passing: Counter[str] = Counter()
    for name, homes in units.items():
        _require_one_way(name, {home for _, home in homes}, execution[name])
        waiting = (unit.largest_leaf_nbytes for unit, home in homes if home in WAITING)
        # Weights on the CPU that compute there do not move.
        passing[execution[name]] = max(passing[execution[name]], *waiting, 0)
    used[CPU] += used.pop(OFFLOAD, 0)
    found = {each.name: _by_module(each, devices) for each in components}
    return Placement(
        components=found,
        execution_devices=execution,
        devices=_uses(used, passing, inventory),
        parts=tuple(
            row
            for component in components
            for row in table_rows(component, found[component.name], execution[component.name])
        ),
        device_map=shorten(components, devices, execution),
        offloading=offloading_uses(components),
    )


def _by_module(component: Component, devices: Devices) -> str | dict[str, str]:
    """Return the device of a component; of its modules, if it has several."""
    merged = merge(component.module, component.name, devices)
    if list(merged) == [component.name]:
        return merged[component.name]
    offset = len(component.name) + 1 if component.name else 0
    return {path[offset:]: device for path, device in merged.items()}


def _execution_device(units: Sequence[tuple[Module, str]], free: Mapping[str, int]) -> str:
    """Return the device on which a component computes.

    That is the device of its first module that is not a block. If some of its weights are offloaded
    it is an accelerator: the first that has a module of it, or else the one with most room left.

    Args:
        units: of the component, each with its device.
        free: what is left of each accelerator.
    """
    homes = [home for _, home in sorted(units, key=lambda each: each[0].is_whole)]
    computing = [home for home in homes if home not in WAITING]
    if len(computing) < len(homes):
        # If there is an accelerator, offloaded weights never compute on the CPU.
        emptiest = max(free, key=lambda name: free[name], default=CPU)
        computing = [home for home in computing if home in free] or [emptiest]
    return computing[0]


def _require_one_way(name: str, homes: Collection[str], execution: str) -> None:
    """Raise ArgumentError where weights wait on a disk and the CPU computes with others.

    Accelerate's hooks know the CPU of such a model only as the place where weights wait.
    """
    if execution != CPU and CPU in homes and DISK in homes:
        raise ArgumentError(
            f"device_map: {name or 'the model'} cannot compute some modules on the cpu and others "
            f"on {execution} while weights wait on a disk; write 'offload' instead of 'cpu' for "
            "its modules"
        )


def _uses(
    used: Mapping[str, int], passing: Mapping[str, int], inventory: Inventory
) -> tuple[DeviceUse, ...]:
    """Return what the devices of an inventory hold, and the CPU and the disk if they hold weights.

    Args:
        used: size of the weights on each device, in bytes; what is on `offload` is on the CPU.
        passing: what comes to each at a time of weights that wait.
        inventory: gives the limits.
    """
    others = (boundless(name) for name in (CPU, DISK) if used[name] and not inventory.find(name))
    return tuple(
        DeviceUse(
            device=device.name,
            nbytes=used[device.name],
            passing_nbytes=passing[device.name],
            limit_nbytes=None if device.is_boundless else device.nbytes,
            headroom_nbytes=device.nbytes - device.room_nbytes,
        )
        for device in (*inventory.devices, *others)
    )


def _require_limits(
    placement: Placement, components: Sequence[Component], inventory: Inventory
) -> None:
    for use in placement.devices:
        needed = use.nbytes + use.passing_nbytes
        if use.limit_nbytes is None or needed <= use.limit_nbytes:
            continue
        there = ", ".join(
            f"{join(row.component, row.modules) or 'the model'} {format_nbytes(row.nbytes)}"
            for row in placement.parts
            if row.device == use.device or (use.device == CPU and row.device == OFFLOAD)
        )
        passing = f", {format_nbytes(use.passing_nbytes)} at a time that wait elsewhere"
        what = (
            f"{format_nbytes(needed)} on {use.device} ({there}{passing * bool(use.passing_nbytes)})"
            f" exceed its {format_nbytes(use.limit_nbytes)}"
        )
        raise _misfit(needed, use.limit_nbytes, use.device, what, components, inventory)
