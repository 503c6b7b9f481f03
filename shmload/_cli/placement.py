"""Placement on the command line: the options of `shmload plan`, and its tables."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

import click

from shmload._cli.output import print_table
from shmload._placement.inventory import CPU, OFFLOAD
from shmload._placement.placement import DeviceUse, Placement
from shmload._placement.shortest_map import print_device_map
from shmload._placement.table import TableRow
from shmload._wording import format_nbytes
from shmload.errors import DeviceMapMalformed


def placement_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for devices and device maps."""
    for option in (
        click.option(
            "--device-map",
            callback=_parse,
            help="A strategy (auto, balanced, balanced_low_0, sequential), a device, or a dict of "
            "devices by component or path; auto if only an inventory is given.",
        ),
        click.option(
            "--inventory",
            help="Devices to plan for, such as 2x24GiB or cuda:0=24GiB,cpu=64GiB; this machine's "
            "if only a device map is given.",
        ),
    ):
        command = option(command)
    return command


def _parse(_context: click.Context, _option: click.Parameter, text: str | None) -> object:
    """Read a device map as JSON or as the Python code that `print_placement` writes."""
    if text is None:
        return None
    text = text.strip().removeprefix("device_map").lstrip(" =")
    if not text.startswith("{"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError) as exc:
        raise DeviceMapMalformed(f"it cannot be read as a dict ({exc})") from exc


def print_placement(placement: Placement) -> None:
    """Print tables of the modules and of the devices, and the device map as Python code."""
    limits = {use.device: use.limit_nbytes for use in placement.devices}
    rows = [
        (
            part.component or "-",
            part.modules or "all",
            format_nbytes(part.nbytes),
            _where(part),
            _share(part.nbytes, limits.get(CPU if part.device == OFFLOAD else part.device)),
        )
        for part in placement.parts
    ]
    print_table(("COMPONENT", "MODULES", "SIZE", "DEVICE", "SHARE"), rows, right=(2, 4))
    click.echo()
    _print_devices(placement.devices)
    click.echo()
    click.echo(print_device_map(placement.device_map))


def _print_devices(devices: Sequence[DeviceUse]) -> None:
    titles: tuple[str, ...] = ("DEVICE", "WEIGHTS", "PASSING", "SIZE", "SHARE")
    rows = [_row(use) for use in devices]
    if not any(use.passing_nbytes for use in devices):
        titles, rows = titles[:2] + titles[3:], [row[:2] + row[3:] for row in rows]
    print_table(titles, rows, right=(1, 2, 3, 4))


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
