"""The names in a folder of results: of its files, of their formats, and the keys of its items."""

import re
from array import array
from bisect import bisect_left

import xxhash

from shmload._host.files import TEMPORARY_SUFFIX
from shmload._results.format import ResultsFormat
from shmload._results.parquet import PARQUET
from shmload._results.safetensors import SAFETENSORS
from shmload._results.webdataset import WEBDATASET
from shmload.errors import ArgumentError

FORMATS: dict[str, ResultsFormat] = {each.name: each for each in (SAFETENSORS, PARQUET, WEBDATASET)}
"""The formats that there are, by name."""
FACTS_NAME = "results.json"
INDEX_NAME = "index.jsonl"

_JOURNAL_SUFFIX = ".journal"
_SUFFIXES = (*(each.suffix for each in FORMATS.values()), _JOURNAL_SUFFIX)
_NUMBERED = re.compile(rf"shard-(\d{{5,}})({'|'.join(map(re.escape, _SUFFIXES))})")
_OURS = re.compile(rf"{_NUMBERED.pattern}|{re.escape(INDEX_NAME)}|{re.escape(FACTS_NAME)}")
_LEFT_OVER = re.compile(rf"({_OURS.pattern})\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}")

_BUCKET_BITS = 10


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


# Keys ---------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return text as a `str` itself: msgspec takes no subclass of it, such as numpy's."""
    return str(text) if isinstance(text, str) else text


def digest_key(key: str) -> int:
    """Return the number of a key: above 0 and below 2**64.

    With 3 million keys, the chance that two have the same number is 1 in 4 million.

    Raises:
        ArgumentError: the key is not text, or UTF-8 cannot encode it.
    """
    if not isinstance(key, str):
        raise ArgumentError(f"the key {key!r} is a {type(key).__name__}; give text")
    try:
        return int(xxhash.xxh3_64_intdigest(key.encode())) or 1
    except UnicodeEncodeError as exc:
        reason = f"the key {key!r} is not text that UTF-8 can encode"
        raise ArgumentError(f"{reason}; give the item another one") from exc


class KeyDigests:
    """A set of such numbers, in sorted buckets: a tenth of the memory of a Python set."""

    def __init__(self) -> None:
        self._buckets = [array("Q") for _ in range(1 << _BUCKET_BITS)]

    def add(self, digest: int) -> bool:
        """Add a number, and return whether it is new."""
        bucket = self._buckets[digest >> (64 - _BUCKET_BITS)]
        place = bisect_left(bucket, digest)
        if place < len(bucket) and bucket[place] == digest:
            return False
        bucket.insert(place, digest)
        return True
