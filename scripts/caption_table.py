"""Captions of pictures in a table: a .csv, .tsv, .jsonl or .parquet file."""

import csv
import json
import math
import posixpath
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click


def rows_of(file: Path) -> Iterator[Mapping[str | None, Any]]:
    """Yield the rows of a table of captions: .csv, .tsv, .jsonl, or .parquet.

    Cells of a row of CSV beyond the columns are a list under None.
    """
    match file.suffix.lower():
        case ".parquet":
            import pyarrow.parquet

            try:
                yield from pyarrow.parquet.read_table(file).to_pylist()
            except (pyarrow.ArrowException, OSError, IndexError) as exc:
                raise ValueError(str(exc)) from exc
        case ".jsonl":
            with file.open(encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _object_of(line, number)
        case ".csv" | ".tsv" as suffix:
            csv.field_size_limit(sys.maxsize)  # the default refuses captions of 128 KiB
            with file.open(encoding="utf-8-sig", newline="") as lines:
                delimiter = "\t" if suffix == ".tsv" else ","
                # strict: a quote that is not closed would take all rows behind it into one cell.
                yield from csv.DictReader(lines, delimiter=delimiter, strict=True)
        case _:
            raise click.UsageError(
                f"{file} is no table of captions: its name must end in .csv, .tsv, .jsonl or "
                ".parquet"
            )


def _object_of(line: str, number: int) -> Mapping[str | None, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ValueError(f"line {number}, column {exc.colno}: {exc.msg}") from exc
    if not isinstance(row, dict):
        raise ValueError(f"line {number}: it is no object of JSON")
    return row


def read_captions(file: Path, name_column: str, text_column: str) -> dict[str, str]:
    """Return the captions in a table by the picture's path below the folder."""
    try:
        rows = list(rows_of(file))
    except (ValueError, ImportError, csv.Error) as exc:
        raise click.UsageError(f"{file} cannot be read: {exc}") from exc
    captions: dict[str, str] = {}
    for number in range(1, len(rows) + 1):
        name, text = (_cell(file, rows, number, column) for column in (name_column, text_column))
        beyond = [cell for cell in rows[number - 1].get(None, ()) if cell.strip()]
        if beyond:  # of CSV; the rest of a text would be lost
            raise click.UsageError(
                f"{file}, row {number}: {name!r} has more cells than there are columns, such as "
                f"{beyond[0].strip()!r}; put a text that has the separator into double quotes"
            )
        name = posixpath.normpath(name) if name else name  # `./a.png` is `a.png`
        if captions.setdefault(name, text) != text:
            raise click.UsageError(
                f"{file}, row {number}: {name!r} has the caption {text!r}, and {captions[name]!r} "
                "in an earlier row; leave one"
            )
    return captions


def _cell(file: Path, rows: Sequence[Mapping[str | None, Any]], number: int, column: str) -> str:
    """Return a text of a row, counted from 1; empty if the cell is."""
    row = rows[number - 1]
    if column not in row:
        has = (
            f"row {number} has no"
            if any(column in other for other in rows)
            else "there is no column"
        )
        has_columns = ", ".join(name for name in row if name is not None)  # None: cells beyond them
        raise click.UsageError(f"{file}: {has} {column!r}; it has {has_columns}")
    value = row[column]
    if value is None or (isinstance(value, float) and math.isnan(value)):  # as pandas writes None
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise click.UsageError(
            f"{file}, row {number}: {column!r} is {value!r}, a {kind}; give text"
        )
    return value.strip()


def captions_for(names: Sequence[str], captions: Mapping[str, str], table: Path) -> dict[str, str]:
    """Return the captions of pictures by name, and say which have none.

    Args:
        names: of the pictures.
        captions: by name, as the table has them.
        table: its file, for messages.
    """
    without = [name for name in names if not captions.get(name)]
    if without:
        first = f"{table} has no caption for {without[0]}"
        if not any(name in captions for name in names):
            example = (
                f"it has {next(iter(captions))!r}, for instance" if captions else "it is empty"
            )
            raise click.UsageError(
                f"{first}, nor for any other picture; {example}; see --file-column"
            )
        click.echo(f"{first}; without one: {len(without)} of {len(names)}", err=True)
    return {name: captions.get(name, "") for name in names}
