"""The names of the files in a folder of results, and the formats of results files."""

import re

from shmload._host.files import TEMPORARY_SUFFIX
from shmload.errors import ArgumentError
from shmload.integrations._results.format import ResultsFormat
from shmload.integrations._results.parquet import PARQUET
from shmload.integrations._results.safetensors import SAFETENSORS
from shmload.integrations._results.webdataset import WEBDATASET

FORMATS: dict[str, ResultsFormat] = {each.name: each for each in (SAFETENSORS, PARQUET, WEBDATASET)}
"""The formats that there are, by name."""
FACTS_NAME = "results.json"
INDEX_NAME = "index.jsonl"
LOCK_NAME = ".lock"

_JOURNAL_SUFFIX = ".journal"
_SUFFIXES = (*(each.suffix for each in FORMATS.values()), _JOURNAL_SUFFIX)
_NUMBERED = re.compile(rf"shard-(\d{{5,}})({'|'.join(map(re.escape, _SUFFIXES))})")
_OURS = re.compile(rf"{_NUMBERED.pattern}|{re.escape(INDEX_NAME)}|{re.escape(FACTS_NAME)}")
_LEFT_OVER = re.compile(rf"({_OURS.pattern})\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}")


def format_named(name: str) -> ResultsFormat:
    """Return a format.

    Raises:
        ArgumentError: there is none of this name.
    """
    if name not in FORMATS:
        raise ArgumentError(f"format is {name!r}; give {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(name: str) -> ResultsFormat:
    """Return the format of the results file with this name; safetensors for a name of none."""
    found = (each for each in FORMATS.values() if name.endswith(each.suffix))
    return next(found, SAFETENSORS)


def file_name(number: int, format: ResultsFormat) -> str:
    """Return the name of a results file."""
    return f"shard-{number:05}{format.suffix}"


def journal_name(number: int) -> str:
    """Return the name of a results file's journal."""
    return f"shard-{number:05}{_JOURNAL_SUFFIX}"


def is_journal(name: str) -> bool:
    """Tell whether a name is that of a journal."""
    return name.endswith(_JOURNAL_SUFFIX)


def number_of(name: str) -> int | None:
    """Return the number in the name of a results file or its journal; None for another name."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else None


def is_ours(name: str) -> bool:
    """Tell whether a job writes files of such a name."""
    return _OURS.fullmatch(name) is not None


def is_left_over(name: str) -> bool:
    """Tell whether it is the temporary name of a file that a killed process was writing."""
    return _LEFT_OVER.fullmatch(name) is not None
