"""How the commands answer: tables for people, JSON for programs."""

import json
import sys
from collections.abc import Iterable, Sequence

import click
import msgspec

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for a program to read."
)


def count_of(number: int, one: str, several: str | None = None) -> str:
    """Write a number with what it counts, such as `1 segment` and `2 segments`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def print_json(value: object) -> None:
    built = msgspec.to_builtins(value, enc_hook=str)
    json.dump(built, sys.stdout, indent=2)
    sys.stdout.write("\n")


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
