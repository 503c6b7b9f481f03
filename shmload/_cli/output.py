"""Printing for the commands: tables for people, JSON for programs."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence

import click
import msgspec

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for a program to read."
)


def is_of_output(exc: OSError) -> bool:
    """Tell whether an error is a failed write to stdout, as on a full disk.

    If so, drop what Python still buffers: it would try again at exit and print a traceback.
    """
    frames = (frame for frame, _ in traceback.walk_tb(exc.__traceback__))
    if not any(frame.f_code is click.echo.__code__ for frame in frames):
        return False
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


def count_of(number: int, one: str, several: str | None = None) -> str:
    """Write a number with its noun, such as `1 segment` or `2 segments`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def print_json(value: object) -> None:
    built = msgspec.to_builtins(value, enc_hook=str)
    click.echo(json.dumps(built, indent=2))  # click flushes, so a failed write raises here


def print_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> None:
    table = [tuple(titles), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles))]
    for row in table:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(cells).rstrip())
