"""Placement on the command line: the options of `shmload plan`."""

import ast
from collections.abc import Callable
from typing import Any

import click

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
    """Read a device map as JSON or as the Python code that a placement is printed with."""
    if text is None:
        return None
    text = text.strip().removeprefix("device_map").lstrip(" =")
    if not text.startswith("{"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError) as exc:
        raise DeviceMapMalformed(f"it cannot be read as a dict ({exc})") from exc
