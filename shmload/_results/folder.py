"""A folder that results are written to."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from shmload._results.claim import Facts, FolderLock, check_facts
from shmload._results.format import Item, Place, accessing, check_names
from shmload._results.index import is_index_of, write_index
from shmload._results.journal import Array, Buffer, flat
from shmload._results.names import (
    FACTS_NAME,
    INDEX_NAME,
    KeyDigests,
    digest_key,
    file_name,
    format_named,
    is_left_over,
    is_ours,
    number_of,
    plain,
)
from shmload._results.shard import Shard
from shmload._wording import logger_of
from shmload.errors import ArgumentError, DuplicateKey, ResultsMismatch

logger = logger_of(__name__)

# safetensors limits a header to 100 MB.
_MAX_SHARD_ITEMS = 10_000
_MAX_ERROR_CHARS = 1000


class ResultsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished folder holds."""

    folder: str
    items: int
    """How many there are, including failed ones."""
    added: int
    """How many results were added in this run; the others were there already."""
    failed: int
    """How many failed, in this run or before; the index says why."""
    failed_before: int
    """How many of these failed in an earlier run, and were not tried again."""
    shards: int
    """How many results files there are."""
    nbytes: int
    """Size of all results files, in bytes."""


class ResultFolder:
    """A folder that results are written to; a context that closes it. For one thread.

    Args:
        folder: made if it does not exist.
        shard_items: how many items a results file (shard) has, at most 10,000.
        facts: what the results depend on beside the items: weights, dtype, seed, ...
        retry_failed: items that failed in an earlier run are to be done again. Without it they
            stay failed, each with its error, unless they are added or fail again.
        format: of the results files: `safetensors`, `parquet`, `webdataset`.

    Raises:
        ArgumentError: an argument is not valid.
        ResultsBusy: another run writes to the folder.
        ResultsMismatch: the folder was made with other facts, or another `shard_items`.
        ResultsCorrupt: a file is not what was written.
        ResultsInaccessible: the kernel refused to read or write.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        shard_items: int = 1000,
        facts: Mapping[str, str],
        retry_failed: bool = False,
        format: str = "safetensors",
    ) -> None:
        if not 0 < shard_items <= _MAX_SHARD_ITEMS:
            raise ArgumentError(f"shard_items is {shard_items}; give 1 to {_MAX_SHARD_ITEMS:,}")
        self.folder = Path(folder)
        self._size = shard_items
        for name, value in facts.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise ArgumentError(f"the fact {name!r} is {value!r}; both must be text")
        self._facts = {plain(name): plain(value) for name, value in facts.items()}
        self._format = format_named(format)
        self._format.require_library()
        self._retry_failed = retry_failed
        self._shards: dict[int, Shard] = {}
        """By number; each is looked at when an item of it is first asked for."""
        self._written: Shard | None = None
        """The one whose journal may be open."""
        self._keys = KeyDigests()
        self._begun: dict[int, str] = {}
        """Keys of items that are not settled, by number; without those that a journal has."""
        self._added = 0
        self._has_index = False
        with accessing(self.folder):
            os.makedirs(self.folder, exist_ok=True)
            self._lock = FolderLock(self.folder)
            try:
                self._there = self._check_folder()
            except BaseException:
                self._lock.release()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder, finished or not; a second call does nothing."""
        if self._written:
            self._written.release()
        self._lock.release()

    def is_done(self, index: int, key: str) -> bool:
        """Tell whether an item's result is stored, by this run or an earlier one; not its error.

        Args:
            index: the item's number, from 0.
            key: its name.

        Raises:
            ArgumentError: the number or the key is not valid, or the folder was closed.
            DuplicateKey: another item has the same key.
            ResultsMismatch: the item had another key.
            ResultsCorrupt, ResultsInaccessible: of its results file or journal.
        """
        with accessing(self.folder):
            return self._locate(index, key).is_done(index)

    def is_settled(self, index: int, key: str) -> bool:
        """Tell whether nothing is left to do for an item.

        Its result is stored, or it has failed: in this run, or earlier without `retry_failed`. An
        item that is asked for and not settled counts as begun: once an item behind it is added, the
        folder has its key, for `continued_order`.

        Args:
            index: the item's number, from 0.
            key: its name.

        Raises:
            ArgumentError, DuplicateKey, ResultsMismatch, ResultsCorrupt, ResultsInaccessible: as
                for `is_done`.
        """
        with accessing(self.folder):
            is_settled = self._locate(index, key).is_settled_at(index)
        if not is_settled:
            self._begun[index] = key
        return is_settled

    def add(self, index: int, key: str, arrays: Mapping[str, Array]) -> None:
        """Store an item's result. On return it survives kill -9 of this process.

        When the last missing item of a results file is added, the file is written and synced to
        disk.

        Args:
            index: the item's number, from 0.
            key: its name.
            arrays: by name; a name has no slash. May be empty.

        Raises:
            ArgumentError: the item is there already, or a name, dtype or shape is not valid.
            ResultsInaccessible: no room, for instance. Stored results stay, perhaps with this
                item; a later run completes the results file.
            DuplicateKey, ResultsMismatch, ResultsCorrupt: as for `is_done`.
        """
        places: dict[str, Place] = {}
        contents: list[Buffer] = []
        offset = 0
        for name, given in sorted(arrays.items()):
            if not name or "/" in name:
                raise ArgumentError(
                    f"item {index}: the array name {name!r} is empty, or has a slash"
                )
            content = flat(given, f"item {index}, array {name!r}")
            places[plain(name)] = Place(given.dtype, tuple(given.shape), offset)
            contents.append(content)
            offset += len(content)
        self._append(index, Item(plain(key), arrays=places), contents)

    def fail(self, index: int, key: str, error: str) -> None:
        """Store an item's error. A later run with `retry_failed` tries the item again.

        Args:
            index: the item's number, from 0.
            key: its name.
            error: the text; only its last 1,000 characters are stored.

        Raises:
            ArgumentError, DuplicateKey, ResultsMismatch, ResultsCorrupt, ResultsInaccessible: as
                for `add`.
        """
        error = error.encode(errors="backslashreplace").decode()[-_MAX_ERROR_CHARS:]
        self._append(index, Item(plain(key), error=error or "unknown"), ())

    def finish(self, count: int) -> ResultsReport:
        """Write the results files and the index that are missing, once every item is settled.

        An item is settled as `is_settled` says.

        Args:
            count: how many items there are.

        Raises:
            ArgumentError: an item is missing.
            ResultsMismatch: the folder holds more items than there are.
            ResultsCorrupt, ResultsInaccessible: of the folder's files; may be called again.
        """
        self._check_open()
        files = -(-count // self._size)
        beyond = [number for number in self._there | set(self._shards) if number >= files]
        if beyond:
            self._refuse_more(min(beyond) * self._size, count)
        nbytes = failed = failed_before = 0
        with accessing(self.folder):
            for number in range(files):
                shard = self._shard(number)
                self._complete(shard, min(self._size, count - shard.first), count)
                nbytes += shard.path.stat().st_size
                now, before = shard.failures()
                failed += now + before
                failed_before += before
            self._ensure_index(files)
        return ResultsReport(
            folder=str(self.folder),
            items=count,
            added=self._added,
            failed=failed,
            failed_before=failed_before,
            shards=files,
            nbytes=nbytes,
        )

    def _check_open(self) -> None:
        if not self._lock.is_held:
            raise ArgumentError(f"{self.folder} was closed, or belongs to the parent process")

    def _check_folder(self) -> set[int]:
        """Write down or compare the facts; return the numbers of the results files that exist."""
        names = os.listdir(self.folder)
        for name in filter(is_left_over, names):
            os.unlink(self.folder / name)
        ours = set(filter(is_ours, names))
        self._has_index = INDEX_NAME in ours
        facts = Facts(format=self._format.version, shard_items=self._size, facts=self._facts)
        check_facts(self.folder, facts, ours - {FACTS_NAME})
        return {number for name in ours if (number := number_of(name)) is not None}

    # Items ----------------------------------------------------------------------------------------

    def _locate(self, index: int, key: str) -> Shard:
        """Return the results file of an item; the key is the item's from now on."""
        self._check_open()
        if index < 0:
            raise ArgumentError(f"an item cannot have the number {index}")
        shard = self._shard(index // self._size)
        digest = digest_key(key)
        known = shard.keys[index - shard.first]
        if known == 0:
            if not self._keys.add(digest):
                raise DuplicateKey(key, (self._find(digest), index))
            shard.keys[index - shard.first] = digest
        elif known != digest:
            stored = shard.key_of(index)
            was = f"was {stored!r}" if stored else "had another key"
            raise ResultsMismatch(self.folder, f"item {index} {was} and is {key!r} now")
        return shard

    def _shard(self, number: int) -> Shard:
        """Return a results file, which need not exist yet."""
        shard = self._shards.get(number)
        if shard is None:
            shard = Shard(
                self.folder, number, self._size, self._format, retry_failed=self._retry_failed
            )
            for index, digest in enumerate(shard.keys, shard.first):
                if digest and not self._keys.add(digest):
                    raise DuplicateKey(shard.key_of(index) or "", (self._find(digest), index))
            self._shards[number] = shard
        return shard

    def _find(self, digest: int) -> int:
        """Return the number of the item that has a key, or -1."""
        found = (s.first + s.keys.index(digest) for s in self._shards.values() if digest in s.keys)
        return next(found, -1)

    def _append(self, index: int, item: Item, contents: Sequence[Buffer]) -> None:
        check_names(index, item, self._size)
        if self._format.check_item:
            self._format.check_item(index, item)
        with accessing(self.folder):
            shard = self._locate(index, item.key)
            if shard.is_done(index):
                raise ArgumentError(f"item {index}, {item.key!r}, was added before")
            self._remove_index()
            self._begun.pop(index, None)
            # Begun items may be gone when a run goes on: then only their keys tell which they were.
            for number in sorted(number for number in self._begun if number < index):
                key = self._begun[number]
                self._write_to(self._locate(number, key)).append(number, Item(plain(key)))
                del self._begun[number]
            self._write_to(shard).append(index, item, contents)
            self._added += item.error is None
            if shard.is_settled:
                self._commit(shard, self._size)

    def _write_to(self, shard: Shard) -> Shard:
        """Return a results file, with no other journal open than its own."""
        if self._written and self._written is not shard:
            self._written.release()
        self._written = shard
        return shard

    def _complete(self, shard: Shard, size: int, count: int) -> None:
        """Check that a results file has its first `size` items; write it if a journal is left.

        Args:
            shard: the file.
            size: how many items it must have, and no more.
            count: how many items the whole run has, for messages.

        Raises:
            ArgumentError: an item is missing.
            ResultsMismatch: the file has more items.
        """
        missing = shard.missing(size)
        if missing >= 0:
            index = shard.first + missing
            raise ArgumentError(f"item {index} of {count} was neither added nor did it fail")
        if any(shard.keys[size:]):
            self._refuse_more(count, count)
        if shard.has_journal:
            self._commit(shard, size)

    def _commit(self, shard: Shard, count: int) -> None:
        self._remove_index()
        self._write_to(shard)
        shard.commit(count, self._facts)

    def _refuse_more(self, index: int, count: int) -> None:
        raise ResultsMismatch(self.folder, f"it has an item {index}, but there are {count} now")

    # The index ------------------------------------------------------------------------------------

    def _remove_index(self) -> None:
        """Mark the folder as unfinished, before anything else in it changes."""
        if self._has_index:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / INDEX_NAME)
            self._has_index = False

    def _ensure_index(self, files: int) -> None:
        """Write the index if there is none, or none of these items: a user or a disk cut it."""
        names = [file_name(number, self._format) for number in range(files)]
        entries = (
            (name, *entry)
            for number, name in enumerate(names)
            for entry in self._shard(number).entries()
        )
        if self._has_index and not is_index_of(self.folder, entries):
            path = self.folder / INDEX_NAME
            logger.warning("%s was damaged; it is written anew from the results files", path)
            self._has_index = False
        if not self._has_index:
            write_index(self.folder, names)
            self._has_index = True
