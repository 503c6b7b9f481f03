"""A placement for people: tables of its components and devices, and its map as Python code."""

from collections.abc import Mapping, Sequence

import msgspec

from shmload._placement.inventory import CPU, OFFLOAD
from shmload._tables import Page, Table
from shmload._wording import format_nbytes


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
