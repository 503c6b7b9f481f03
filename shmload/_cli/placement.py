"""Placement on the command line: the options of `shmload plan`."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shmload._host.files import replacing
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
        click.option(
            "--html",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Also write a page for browsers that shows the devices and what travels.",
        ),
    ):
        command = option(command)
    return command


def write_page(path: Path, text: str) -> None:
    """Write a page for browsers, whole or not at all.

    Raises:
        click.FileError: it cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as exc:
        raise click.FileError(str(path), exc.strerror or str(exc)) from exc


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
        raise DeviceMapMalformed(
            'it cannot be read as a dict; quote the names, as in {"vae": "cuda:1"}'
        ) from exc
