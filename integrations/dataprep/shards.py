"""Shards: the unit in which a folder of results is computed, written and taken up again.

    shard-00000.safetensors  the arrays of its items that have a result
    shard-00000.json         the keys of its items, and the errors of those that failed

Guarantee: a shard counts once its list exists. Both files appear whole, the list last.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shmload._host.files import replacing
from shmload._wording import encodable
from shmload.errors import JobError, ResultsError
from shmload.integrations.dataprep.crossing import describe_error, load
from shmload.integrations.dataprep.formats import FORMATS, Arrays, arrays_of

_ERROR_LENGTH = 1000


class Row(NamedTuple):
    """An item that is to be computed."""

    number: int
    item: bytes
    """Pickled."""
    key: str = ""


class Shard(NamedTuple):
    """Where the results of a shard's items go."""

    path: str
    """Of its files, without their suffixes."""
    format: str
    facts: str
    """A digest of what the results depend on; the list has it."""
    raises: bool
    """Whether the error of an item ends the shard."""


def write_shard(
    shard: Shard,
    rows: Collection[Row],
    killed: Mapping[int, str],
    call: Callable[[Row], Any],
) -> dict[str, str]:
    """Compute and write a shard; return the errors of its items that failed, by key.

    Args:
        shard: where it goes.
        rows: its items.
        killed: errors of items at which processes have ended, by number. Those without an error
            are tried again, first of all, so that little is done again if another process ends.
        call: computes an item.

    Raises:
        ResultsError: the file system refuses the files.
        JobError: the format's library refuses the results.
        Exception: what the function raises, if the shard `raises`.
    """
    results: dict[int, Arrays] = {}
    errors = {number: error for number, error in killed.items() if error}
    for row in sorted(rows, key=lambda row: row.number not in killed):
        if row.number in errors:
            continue
        try:
            results[row.number] = arrays_of(call(row))
        except (Exception, SystemExit) as exc:
            if shard.raises:
                raise
            errors[row.number] = encodable(describe_error(exc))[:_ERROR_LENGTH]
    stored = [(row.number, row.key, results[row.number]) for row in rows if row.number in results]
    failed = {row.key: errors[row.number] for row in rows if row.number in errors}
    suffix, _, write = FORMATS[shard.format]
    try:
        write_whole(shard.path + suffix, lambda file: write(file, stored))
    except ResultsError:
        raise
    except Exception as exc:
        reason = describe_error(exc)
        raise JobError(f"{shard.path}{suffix} cannot be written: {reason}") from exc
    listed = {"facts": shard.facts, "keys": [row.key for row in rows], "errors": failed}
    write_whole(shard.path + ".json", lambda file: file.write(json.dumps(listed).encode()))
    return failed


def perform(
    shard: Shard | None,
    rows: list[Row],
    killed: Mapping[int, str],
    function: Callable[[int, Any], Any],
    at: Callable[[int], None] = lambda number: None,
) -> Any:
    """Do a task: return the result of its one row, or write its shard, as `write_shard`.

    Args:
        shard: where results go; None if the result is to be returned.
        rows: the items.
        killed: as for `write_shard`.
        function: of a number and an item.
        at: is called with the number of each item of a shard before the item is begun.
    """

    def call(row: Row) -> Any:
        if shard:
            at(row.number)
        return function(row.number, load([row.item]))

    return write_shard(shard, rows, killed, call) if shard else call(rows[0])


def write_whole(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file whole or not at all; return once it and its name survive a loss of power.

    Raises:
        ResultsError: the file system refuses it.
    """
    try:
        with replacing(path, durable=True) as file:
            write(file)
    except OSError as exc:
        raise ResultsError(
            f"{path} cannot be written: {exc.strerror or exc}; see to its disk and permissions, "
            "then run the job again: it does what is missing",
            folder=str(path),
            errno=exc.errno,
        ) from exc
