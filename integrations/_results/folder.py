"""A folder that results are written to."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from shmload._wording import logger_of
from shmload.errors import ArgumentError, ResultsMismatch
from shmload.integrations._results.errors import accessing
from shmload.integrations._results.facts import Facts, check_facts
from shmload.integrations._results.index import is_index_of, write_index
from shmload.integrations._results.items import Array, NewItem, failure, note, result
from shmload.integrations._results.keys import plain
from shmload.integrations._results.lock import FolderLock
from shmload.integrations._results.names import (
    FACTS_NAME,
    INDEX_NAME,
    file_name,
    format_named,
    is_left_over,
    is_ours,
    number_of,
)
from shmload.integrations._results.progress import FileProgress
from shmload.integrations._results.table import ItemTable

logger = logger_of(__name__)

# safetensors limits a header to 100 MB.
_MAX_SHARD_ITEMS = 10_000


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
        self._items = ItemTable(self.folder, shard_items, self._format, retry_failed=retry_failed)
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
        self._items.release()
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
            file, place = self._locate(index, key)
            return file.is_done(place)

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
            file, place = self._locate(index, key)
            is_settled = file.is_settled_at(place)
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
        self._append(result(index, key, arrays, self._format, self._size))

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
        self._append(failure(index, key, error, self._format, self._size))

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
        beyond = [number for number in self._there | self._items.numbers if number >= files]
        if beyond:
            self._refuse_more(min(beyond) * self._size, count)
        nbytes = failed = failed_before = 0
        with accessing(self.folder):
            for number in range(files):
                file = self._items.file(number)
                self._complete(file, min(self._size, count - file.first), count)
                nbytes += file.path.stat().st_size
                now, before = file.failures()
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

    def _locate(self, index: int, key: str) -> tuple[FileProgress, int]:
        self._check_open()
        return self._items.locate(index, key)

    def _append(self, item: NewItem) -> None:
        head = item.head
        with accessing(self.folder):
            file, place = self._locate(head.index, head.key)
            if file.is_done(place):
                raise ArgumentError(f"item {head.index}, {head.key!r}, was added before")
            self._remove_index()
            self._begun.pop(head.index, None)
            self._note_begun(head.index)
            self._items.use_journal(file)
            file.append(place, head, item.contents)
            self._added += head.error is None
            if file.is_settled:
                self._commit(file, self._size)

    def _note_begun(self, end: int) -> None:
        """Write down the keys of begun items below a number, for `continued_order`.

        The items may be gone when a run goes on: then only their keys tell which they were.
        """
        for index in sorted(number for number in self._begun if number < end):
            file, _ = self._locate(index, self._begun[index])
            self._items.use_journal(file)
            file.note(note(index, self._begun[index]))
            del self._begun[index]

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
            for entry in self._items.file(number).entries()
        )
        if self._has_index and not is_index_of(self.folder, entries):
            path = self.folder / INDEX_NAME
            logger.warning("%s was damaged; it is written anew from the results files", path)
            self._has_index = False
        if not self._has_index:
            write_index(self.folder, names)
            self._has_index = True

    def _complete(self, file: FileProgress, size: int, count: int) -> None:
        """Check that a results file has its first `size` items; write it if a journal is left.

        Args:
            file: the file's progress.
            size: how many items the file must have, and no more.
            count: how many items the whole run has, for messages.

        Raises:
            ArgumentError: an item is missing.
            ResultsMismatch: the file has more items.
        """
        missing = file.missing(size)
        if missing >= 0:
            index = file.first + missing
            raise ArgumentError(f"item {index} of {count} was neither added nor did it fail")
        if any(file.keys[size:]):
            self._refuse_more(count, count)
        if file.has_journal:
            self._commit(file, size)

    def _commit(self, file: FileProgress, count: int) -> None:
        self._remove_index()
        file.commit(count, self._facts)
        self._items.forget_journal(file)

    def _refuse_more(self, index: int, count: int) -> None:
        raise ResultsMismatch(self.folder, f"it has an item {index}, but there are {count} now")
