"""A placement as the rows of a table: consecutive blocks on one device share a row."""

from collections.abc import Sequence

import msgspec

from shmload._placement.inventory import DISK, OFFLOAD
from shmload._placement.modules import Component, Module

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
