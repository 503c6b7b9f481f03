"""A placement for people: tables of its modules and devices, and its device map as Python code."""

from collections.abc import Mapping, Sequence

from shmload._placement.device_use import DeviceUse
from shmload._placement.inventory import CPU, OFFLOAD
from shmload._placement.shortest_map import print_device_map
from shmload._placement.table import TableRow
from shmload._tables import Page, Table
from shmload._wording import format_nbytes


def placement_page(
    parts: Sequence[TableRow], devices: Sequence[DeviceUse], device_map: Mapping[str, str]
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
    return Page((modules, "", _device_table(devices), "", print_device_map(device_map)))


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
