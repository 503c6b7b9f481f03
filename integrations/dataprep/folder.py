"""A folder of results: which of its shards are done, and which job writes it.

    results.json             what the results depend on; locked by the job that writes
    shard-00000.safetensors  the arrays of the first items that have a result
    shard-00000.json         the keys of its items, and the errors of those that failed
    index.jsonl              a line for each item, once all have a result or an error

Guarantee: a job that was killed does the shards again that it was at, and no other; the finished
folder has the same bytes. One job writes at a time.
"""

import contextlib
import fcntl
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shmload._host.files import TEMPORARY_FILES
from shmload.errors import ArgumentError, ResultsError, needing
from shmload.integrations.dataprep.shards import (
    FORMATS,
    Listed,
    Row,
    Task,
    refused,
    refusing,
    results_error,
    write_whole,
)

_FACTS = "results.json"
_INDEX = "index.jsonl"


@dataclass
class Report:
    """What a folder has, and what a run has done.

    Attributes:
        items: how many items the folder has.
        computed: how many were computed in this run, failed ones included.
        failed: how many of all have no result.
        shards: how many shards the folder has.
    """

    items: int = 0
    computed: int = 0
    failed: int = 0
    shards: int = 0


class Folder(contextlib.AbstractContextManager["Folder"]):
    """A folder that one job writes; a context that frees it.

    Args:
        path: made if it does not exist.
        facts: what the results depend on, as text by name.
        format: of the shards, a name in `FORMATS`.
        shard_items: how many items a shard has.

    Raises:
        ArgumentError, LibraryError: an argument cannot work.
        ResultsError: another job writes to the folder, its results were made with other facts, or
            the file system refuses it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        facts: Mapping[str, str],
        format: str,
        shard_items: int,
    ) -> None:
        if format not in FORMATS:
            raise ArgumentError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
        self._suffix, library, _ = FORMATS[format]
        with needing(library, f"the format {format!r}", f"'shmload[{format}]'"):
            importlib.import_module(library)
        if shard_items < 1:
            raise ArgumentError(f"shard_items is {shard_items}; it must be 1 or more")
        self.path = Path(path)
        self.report = Report()
        self._format, self._size = format, shard_items
        self._facts = {**facts, "format": format, "shard_items": str(shard_items)}
        self._keys: set[bytes] = set()
        with refusing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self.path / _FACTS, os.O_RDWR | os.O_CREAT, 0o666), "r+")
            try:
                self._claim()
            except BaseException:
                with contextlib.suppress(OSError):  # it writes what it has again
                    self._file.close()
                raise

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def tasks(
        self,
        items: Iterable[Any],
        key: Callable[[Any], str] | None,
        retry: bool,
    ) -> Iterator[Task]:
        """Yield the shards that are to be done, and count all items in the report.

        Args:
            items: of the job, in the same order each time.
            key: returns an item's key; None for its number as text of eight digits.
            retry: whether shards with failed items are done again.

        Raises:
            ArgumentError: two items have the same key, or one has no text as key.
            ResultsError: the folder has results of other items.
        """
        numbered = enumerate(items)
        while part := list(islice(numbered, self._size)):
            number = self.report.shards
            keys = [self._key(place, item, key) for place, item in part]
            errors = self._errors(number, keys)
            self.report.items += len(part)
            self.report.shards += 1
            if errors is None or (errors and retry):
                with refusing(self.path):
                    (self.path / _INDEX).unlink(missing_ok=True)
                self.report.computed += len(part)
                rows = [
                    Row.of(place, item, name)
                    for (place, item), name in zip(part, keys, strict=True)
                ]
                yield Task(rows, str(self._path(number)), self._format)
            else:
                self.report.failed += len(errors)
        if self._beyond(".json"):
            raise self._mismatch(f"it has more than these {self.report.items} items")

    def finish(self) -> Report:
        """Write the index, once all shards are done, and remove what killed processes left."""

        def write(file: BinaryIO) -> None:
            for number in range(self.report.shards):
                path = self._path(number)
                content = path.with_suffix(".json").read_bytes()
                listed = msgspec.json.decode(content, type=Listed)
                for key in listed.keys:
                    error = listed.errors.get(key)
                    line = {"key": key} | ({"error": error} if error else {"shard": path.name})
                    file.write(msgspec.json.encode(line) + b"\n")

        temporary = [path for path in self.path.glob(TEMPORARY_FILES) if path.is_file()]
        with refusing(self.path):
            for left in (*temporary, *self._beyond(self._suffix)):
                left.unlink()
        write_whole(self.path / _INDEX, write, durable=True)
        return self.report

    def _path(self, number: int) -> Path:
        """Return the path of a shard's files, without their suffixes."""
        return self.path / f"shard-{number:05}"

    def _beyond(self, suffix: str) -> list[Path]:
        """Return the files of shards that the items do not reach."""
        pattern = f"shard-*{suffix}"
        numbers = ((path, path.stem.removeprefix("shard-")) for path in self.path.glob(pattern))
        return [
            path
            for path, number in numbers
            if number.isdecimal() and int(number) >= self.report.shards
        ]

    def _mismatch(self, reason: str) -> ResultsError:
        remedy = "give another folder, or the items and facts of before. Nothing was changed"
        return results_error(self.path, f"has the results of another job: {reason}; {remedy}")

    def _claim(self) -> None:
        """Lock it; compare the facts with those there, or write them if it has no results."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            reason = "is written by another job; wait for its end, or give another folder"
            raise results_error(self.path, reason) from exc
        if any(self.path.glob("shard-*.json")):
            try:
                there = dict(json.loads(self._file.read() or "{}"))
            except (ValueError, TypeError) as exc:
                reason = f"is damaged: {exc}; give another folder"
                raise results_error(self.path / _FACTS, reason) from exc
            for name in sorted({*there, *self._facts}):
                was, now = there.get(name), self._facts.get(name)
                if was != now:
                    raise self._mismatch(f"its {name} is {was!r}, and now {now!r}")
        else:
            self._file.truncate()
            json.dump(self._facts, self._file, indent=1, sort_keys=True)
            self._file.flush()
            os.fsync(self._file)  # a shard that outlives a loss of power must find it

    def _key(self, number: int, item: Any, key: Callable[[Any], str] | None) -> str:
        if key is None:
            return f"{number:08}"
        name = key(item)
        if not isinstance(name, str) or name != name.encode(errors="replace").decode():
            raise ArgumentError(
                f"the key of item {number} is {name!r}; give text that UTF-8 can encode"
            )
        digest = blake2b(name.encode(), digest_size=16).digest()  # however long the key is
        if digest in self._keys:
            raise ArgumentError(
                f"item {number} has the key {name!r}, as an item before it; give each its own",
                key=name,
                index=number,
            )
        self._keys.add(digest)
        return name

    def _errors(self, number: int, keys: list[str]) -> Mapping[str, str] | None:
        """Return the errors of a shard that is done, by key; None if it is to be done."""
        path = self._path(number).with_suffix(".json")
        try:
            listed = msgspec.json.decode(path.read_bytes(), type=Listed)
        except (FileNotFoundError, msgspec.DecodeError):  # cut, by a loss of power
            return None
        except OSError as exc:
            raise refused(path, exc) from exc
        if listed.keys != keys[: len(listed.keys)]:
            raise self._mismatch(f"{path.name} lists other items")
        is_whole = path.with_suffix(self._suffix).exists()
        return listed.errors if is_whole and len(listed.keys) == len(keys) else None


class Results(Sequence[Any]):
    """The items that have a result, in their order; each is a dict of tensors by name.

    It reads the index when it is made, and of an access the bytes of that item. It pickles as its
    path. Shards of other formats than safetensors are read by their own libraries; of such a folder
    this has the keys and errors.

    Args:
        folder: of a job that has ended.

    Attributes:
        keys: of the items that have a result, in their order.
        errors: why the others have none, by key.

    Raises:
        ResultsError: there is no index; the job has not ended. Or a file is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.errors: dict[str, str] = {}
        self._shards: dict[str, str] = {}
        try:
            self._format = json.loads((self.folder / _FACTS).read_text())["format"]
            with (self.folder / _INDEX).open("rb") as lines:
                for line in map(msgspec.json.decode, lines):
                    if "error" in line:
                        self.errors[line["key"]] = line["error"]
                    else:
                        self._shards[line["key"]] = sys.intern(line["shard"])
        except FileNotFoundError as exc:
            reason = "has no index of results; run the job that writes it to its end"
            raise results_error(self.folder, reason) from exc
        except Exception as exc:  # of what a damaged file can have
            raise refused(self.folder, exc) from exc
        self.keys = list(self._shards)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, item: Any) -> Any:
        """Return the tensors of an item by name, on the CPU, each in memory of its own.

        Args:
            item: its key, or its place among those that have a result; or a slice of places.

        Raises:
            KeyError: no item has that key, or it failed.
            IndexError: there is no such place.
            ResultsError: its shard is gone or damaged, or the folder has another format than
                safetensors.
        """
        if isinstance(item, slice):
            return [self[key] for key in self.keys[item]]
        key = item if isinstance(item, str) else self.keys[item]
        if key in self.errors:
            raise KeyError(f"{key!r} failed: {self.errors[key]}")
        path = self.folder / f"{self._shards[key]}.safetensors"
        if self._format != "safetensors":
            remedy = "read its shards with that library, as docs/dataprep.md shows"
            raise results_error(self.folder, f"has the format {self._format}; {remedy}")
        try:
            shard, names = _opened(path, path.stat().st_mtime_ns)
            return {name.rpartition("/")[2]: shard.get_tensor(name) for name in names.get(key, ())}
        except Exception as exc:
            raise refused(path, exc) from exc

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)


@lru_cache(maxsize=64)
def _opened(path: Path, version: int) -> tuple[Any, dict[str, list[str]]]:
    """Open a shard; return it, and the names of its tensors by key."""
    from safetensors import safe_open

    shard: Any = safe_open(path, "pt")
    names: dict[str, list[str]] = {}
    for name in list(shard.keys()):
        names.setdefault(name.rpartition("/")[0], []).append(name)
    return shard, names
