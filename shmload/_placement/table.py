"""A placement for people: tables of its modules and devices, and its map as Python code."""

from collections.abc import Mapping, Sequence

import msgspec

from shmload._placement.inventory import CPU, DISK, OFFLOAD
from shmload._placement.modules import Component, Module
from shmload._placement.offloading import OffloadingUse, offloading_table
from shmload._placement.shortest_map import print_device_map
from shmload._tables import Page, Table
from shmload._wording import format_nbytes

WAITING = (OFFLOAD, DISK)
"""Not devices that compute: weights wait there and are copied when they are needed."""


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """Modules of one component that are on one device."""

    component: str
    modules: str
    """Such as `transformer_blocks.0-9`; empty for a whole component, `rest` for all but blocks."""
    nbytes: int
    """Size of their weights, in bytes."""
    device: str
    """Where the weights are."""
    execution_device: str
    """Where the modules compute; not `device` if the weights are on `offload` or `disk`."""
    runs_each_step: bool = False
    """Whether its component computes at every step of a generation, and not once."""


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The weights on one device."""

    device: str
    nbytes: int
    """Size of the weights that are there, in bytes."""
    passing_nbytes: int
    """The most that comes there at a time of weights on `offload` or `disk`, in bytes."""
    limit_nbytes: int | None
    """How many bytes may lie there at most; None if the inventory has no limit."""
    headroom_nbytes: int
    """How many of these bytes a strategy leaves to activations; a device map may take them."""


def table_rows(
    component: Component, placed: str | dict[str, str], execution: str
) -> list[TableRow]:
    """Return a component's rows: one per run of consecutive blocks, one for everything else.

    A run is on one device; everything else has one row per device.

    Args:
        component: what is placed.
        placed: as in `Placement.components`.
        execution: as in `Placement.execution_devices`.
    """
    if isinstance(placed, str):
        placed = {"": placed}
    groups: dict[tuple[str, str], list[str]] = {}
    sizes = {path: _find(component.module, path) for path in placed}
    previous: tuple[str, str] | None = None
    for path, device in placed.items():
        start, _, last = path.rpartition(".")
        key = (device, "")
        if path and sizes[path].has_whole():
            key = (device, path)
            if last.isdecimal() and previous and previous[0] == device:
                before = groups[previous][-1].rpartition(".")
                key = previous if before[0] == start and before[2].isdecimal() else key
            previous = key
        groups.setdefault(key, []).append(path)
    return [
        TableRow(
            component=component.name,
            modules=_range_of(paths) if start else "rest" if len(placed) > 1 else "",
            nbytes=sum(sizes[path].nbytes for path in paths),
            device=device,
            execution_device=execution if device in WAITING else device,
            runs_each_step=component.runs_each_step,
        )
        for (device, start), paths in groups.items()
    ]


def _find(module: Module, path: str) -> Module:
    for name in path.split(".") if path else ():
        module = next(child for child in module.children if child.name == name)
    return module


def _range_of(paths: Sequence[str]) -> str:
    last = paths[-1].rpartition(".")[2]
    return paths[0] if len(paths) == 1 else f"{paths[0]}-{last}"


def placement_page(
    parts: Sequence[TableRow],
    devices: Sequence[DeviceUse],
    device_map: Mapping[str, str],
    offloading: Sequence[OffloadingUse],
) -> Page:
    """Return the page of a placement; the arguments are its fields."""
    limits = {use.device: use.limit_nbytes for use in devices}
    rows = [
        (
            part.component or "-",
            part.modules or "all",
            format_nbytes(part.nbytes),
            _where(part),
            _share(part.nbytes, limits.get(CPU if part.device == OFFLOAD else part.device)),
        )
        for part in parts
    ]
    titles = ("COMPONENT", "MODULES", "SIZE", "DEVICE", "SHARE")
    modules = Table(titles=titles, rows=rows, right=(2, 4))
    rooms = [use.limit_nbytes for use in devices if use.device not in (CPU, DISK)]
    room = None if None in rooms else max(filter(None, rooms), default=None)
    tables: tuple[Table | str, ...] = (modules, "", _device_table(devices), "")
    tables += (print_device_map(device_map),)
    if rooms:
        tables += ("", offloading_table(offloading, room))
    return Page(tables)


def _device_table(devices: Sequence[DeviceUse]) -> Table:
    titles: tuple[str, ...] = ("DEVICE", "WEIGHTS", "PASSING", "SIZE", "SHARE")
    rows = [_row(use) for use in devices]
    if not any(use.passing_nbytes for use in devices):
        titles, rows = titles[:2] + titles[3:], [row[:2] + row[3:] for row in rows]
    return Table(titles=titles, rows=rows, right=tuple(range(1, len(titles))))


def _where(part: TableRow) -> str:
    if part.device == part.execution_device:
        return part.device
    return f"{part.device}, computes on {part.execution_device}"


def _row(use: DeviceUse) -> tuple[str, ...]:
    return (
        use.device,
        format_nbytes(use.nbytes),
        format_nbytes(use.passing_nbytes) if use.passing_nbytes else "-",
        "-" if use.limit_nbytes is None else format_nbytes(use.limit_nbytes),
        _share(use.nbytes + use.passing_nbytes, use.limit_nbytes),
    )


def _share(nbytes: int, limit: int | None) -> str:
    if not limit:
        return "-"
    share = 100 * nbytes / limit
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"
