"""A folder of results: which of its shards are done, and which job writes it.

    results.json             what the results depend on; locked by the job that writes
    shard-00000.safetensors  the arrays of the first items that have a result
    shard-00000.json         the keys of its items, and the errors of those that failed
    index.jsonl              a line for each item, once all have a result or an error

Guarantee: a job that was killed does the shards again that it was at, and no other; the finished
folder has the same bytes. One job writes at a time; nothing of a killed job writes after it.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

from shmload._host.files import TEMPORARY_SUFFIX
from shmload.errors import (
    ArgumentError,
    ResultsError,
)
from shmload.integrations.dataprep.crossing import dump_whole
from shmload.integrations.dataprep.formats import require_format
from shmload.integrations.dataprep.pool import Task
from shmload.integrations.dataprep.shards import Row, Shard, write_whole

FACTS = "results.json"
INDEX = "index.jsonl"
# The processes of a job that was killed have its lock until the kernel has ended them.
_LOCK_TIMEOUT_S = 3.0


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


class Folder:
    """A folder that one job writes; a context that frees it.

    Args:
        path: made if it does not exist.
        facts: what the results depend on, as text by name.
        format: of the shards, a name in `FORMATS`.
        shard_items: how many items a shard has.

    Raises:
        ArgumentError, LibraryMissing: an argument cannot work.
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
        require_format(format)
        if shard_items < 1:
            raise ArgumentError(f"shard_items is {shard_items}; it must be 1 or more")
        self.path = Path(path)
        self.report = Report()
        self._format, self._size = format, shard_items
        self._facts = {**facts, "format": format, "shard_items": str(shard_items)}
        self._digest = _digest(json.dumps(self._facts, sort_keys=True)).hex()
        self._keys: set[bytes] = set()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self.path / FACTS, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        except OSError as exc:
            raise ResultsError(
                f"{self.path} cannot be written: {exc.strerror or exc}; see to its disk and "
                "permissions, then run the job again: it does what is missing",
                folder=str(self.path),
                errno=exc.errno,
            ) from exc
        try:
            self._lock()
            self._claim()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the job's processes have it open, too
        self._file.close()

    @property
    def lock(self) -> int:
        """The descriptor of the locked file."""
        return self._file.fileno()

    def tasks(
        self,
        items: Iterable[Any],
        key: Callable[[Any], str] | None,
        *,
        retry: bool,
        raises: bool,
        on_skip: Callable[[int], None],
    ) -> Iterator[Task]:
        """Yield the shards that are to be done, and count all items in the report.

        Args:
            items: of the job, in the same order each time.
            key: returns an item's key; None for its number as text of eight digits.
            retry: whether shards with failed items are done again.
            raises: whether the error of an item ends its shard.
            on_skip: is called with the number of items of each shard that is done.

        Raises:
            ArgumentError: two items have the same key.
            ArgumentError: a key is no text.
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
                (self.path / INDEX).unlink(missing_ok=True)
                self.report.computed += len(part)
                rows = [
                    Row(place, dump_whole(item), name)
                    for (place, item), name in zip(part, keys, strict=True)
                ]
                path = str(self._path(number))
                yield Task(number, rows, Shard(path, self._format, self._digest, raises))
            else:
                self.report.failed += len(errors)
                on_skip(len(part))
        if self._path(self.report.shards).with_suffix(".json").exists():
            raise self._mismatch(f"it has more than these {self.report.items} items")

    def finish(self) -> Report:
        """Write the index, once all shards are done."""

        def write(file: BinaryIO) -> None:
            for number in range(self.report.shards):
                path = self._path(number)
                listed = json.loads(path.with_suffix(".json").read_text())
                for key in listed["keys"]:
                    error = listed["errors"].get(key)
                    line = {"key": key} | ({"error": error} if error else {"shard": path.name})
                    file.write(json.dumps(line).encode() + b"\n")

        if not (self.path / INDEX).exists():
            write_whole(self.path / INDEX, write)
        return self.report

    def _path(self, number: int) -> Path:
        """Return the path of a shard's files, without their suffixes."""
        return self.path / f"shard-{number:05}"

    def _lock(self) -> None:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    raise ResultsError(
                        f"another job writes to {self.path}; wait for its end, or give another "
                        "folder",
                        folder=str(self.path),
                    ) from exc
            time.sleep(0.02)

    def _mismatch(self, reason: str) -> ResultsError:
        return ResultsError(
            f"{self.path} has the results of another job: {reason}; give another folder, or the "
            "items and facts of before. Nothing was changed",
            folder=str(self.path),
        )

    def _claim(self) -> None:
        """Compare the facts with those of the folder, or write them if it has no results."""
        for left in self.path.glob(f"*{TEMPORARY_SUFFIX}"):  # of a file system such as NFS
            left.unlink()
        if any(self.path.glob("shard-*.json")):
            there = json.load(self._file)
            names = sorted({*there.items()} ^ {*self._facts.items()})
            if names:
                name = names[0][0]
                was, now = there.get(name), self._facts.get(name)
                raise self._mismatch(f"its {name} is {was!r}, and now {now!r}")
        else:
            self._file.truncate()
            json.dump(self._facts, self._file, indent=1, sort_keys=True)
            self._file.flush()

    def _key(self, number: int, item: Any, key: Callable[[Any], str] | None) -> str:
        if key is None:
            return f"{number:08}"
        name = key(item)
        if not isinstance(name, str) or name != name.encode(errors="replace").decode():
            raise ArgumentError(f"the key of item {number} is {name!r}; give text that UTF-8 has")
        digest = _digest(name)  # 16 bytes, however long the key is
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
            listed = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        there: list[str] = listed["keys"]
        if there != keys[: len(there)]:
            raise self._mismatch(f"{path.name} lists other items")
        is_whole = listed["facts"] == self._digest and len(there) == len(keys)
        errors: dict[str, str] = listed["errors"]
        return errors if is_whole else None


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
