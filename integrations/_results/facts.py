"""The facts: what the results in a folder depend on, as `results.json` says."""

import os
from pathlib import Path

import msgspec

from shmload._host.files import plain_only, replacing
from shmload.errors import ArgumentError, ResultsCorrupt, ResultsMismatch
from shmload.integrations._results.names import FACTS_NAME, FORMATS

_OTHERWISE = "put the file back from a copy, or give another folder"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Two folders with equal facts and the same items have equal bytes."""

    format: str
    """The version of the format, which says its name too."""
    shard_items: int
    facts: dict[str, str]


def check_facts(folder: Path, facts: Facts, others: set[str]) -> None:
    """Compare a run's facts with those of a folder that has results; write them if it has none.

    Args:
        folder: of results; the caller has its lock.
        facts: of this run.
        others: names of the folder's other files that a job writes.

    Raises:
        ArgumentError: a fact is not text that UTF-8 can encode.
        ResultsMismatch: the folder has other facts.
        ResultsCorrupt: the folder has results but no facts, or facts that cannot be read.
        OSError: they cannot be read or written.
    """
    path = folder / FACTS_NAME
    if others:
        if not path.exists():
            raise ResultsCorrupt(path, f"it is not there, but {min(others)} is", _OTHERWISE)
        different = _differences(_read(path), facts)
        if different:
            raise ResultsMismatch(folder, "; ".join(different))
    else:  # facts that are there now are those of a run that has stored nothing
        try:
            content = msgspec.json.format(msgspec.json.encode(facts, order="sorted"))
        except UnicodeEncodeError as exc:
            raise ArgumentError("a fact is not text that UTF-8 can encode") from exc
        with replacing(path, durable=True) as file:
            file.write(content + b"\n")


def _read(path: str | os.PathLike[str]) -> Facts:
    with open(path, "rb", opener=plain_only) as file:
        content = file.read()
    try:
        return msgspec.json.decode(content, type=Facts)
    except msgspec.DecodeError as exc:
        raise ResultsCorrupt(path, str(exc), _OTHERWISE) from exc


def _differences(there: Facts, now: Facts) -> list[str]:
    names = {each.version: each.name for each in FORMATS.values()}
    pairs = [
        ("the format", names.get(there.format, there.format), names[now.format]),
        ("shard_items", there.shard_items, now.shard_items),
        *(
            (f"fact {name!r}", there.facts.get(name), now.facts.get(name))
            for name in sorted(there.facts.keys() | now.facts.keys())
        ),
    ]
    return [f"{name} is {old!r} there, and {new!r} now" for name, old, new in pairs if old != new]
