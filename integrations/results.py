"""Results of data-prep jobs in a folder: shards of tensors, and an index of the items.

    FOLDER/results.json               what the results depend on, and how many items a shard has
    FOLDER/shard-00000.safetensors    the first items' arrays
    FOLDER/shard-00001.journal        a shard of which items are missing still
    FOLDER/index.jsonl                a line for each item; there once the job has ended

A folder can be given up at any moment, by kill -9 too, and filled on later. What it holds in the
end depends on the items and their results alone: not on the order in which these came, nor on how
often the job was killed, or an item failed, on the way. `docs/dataprep.md` says what is in a file.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from shmload._host.files import TEMPORARY_SUFFIX
from shmload.errors import ArgumentError, DuplicateKey, ResultsMismatch
from shmload.integrations._results.facts import FACTS_NAME, Facts, check_facts
from shmload.integrations._results.index import INDEX_NAME, Results, write_index
from shmload.integrations._results.items import Array, Given, failure, result
from shmload.integrations._results.keys import KeyDigests, digest_key
from shmload.integrations._results.lock import FolderLock
from shmload.integrations._results.progress import ShardProgress, shard_name
from shmload.integrations._results.shards import accessing

__all__ = ["Array", "ResultFolder", "Results", "ResultsReport"]

_OURS = re.compile(r"shard-\d{5,}\.(safetensors|journal)|index\.jsonl|results\.json")
_LEFT_OVER = re.compile(rf"({_OURS.pattern})\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}")
# safetensors limits a header to 100 MB.
_MAX_SHARD_ITEMS = 10_000
_MAX_OPEN_JOURNALS = 16


class ResultsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder holds in the end."""

    folder: str
    items: int
    """How many there are, failed ones included."""
    added: int
    """How many of them were added in this run; the others were there already."""
    failed: int
    """How many failed; the index says why, and the next run tries them again."""
    shards: int
    nbytes: int
    """Size of the shards together, in bytes."""


class ResultFolder:
    """A folder that results are written to; a context manager, and to be used by one thread.

    Args:
        folder: made if it does not exist.
        shard_items: how many items a shard has, at most 10,000.
        facts: what the results depend on beside the items: weights, dtype, seed, ...

    Raises:
        ArgumentError: an argument cannot work.
        ResultsBusy: another run writes to the folder.
        ResultsMismatch: what it holds was made with other facts, or other shards.
        ResultsCorrupt: what it holds is not what was written.
        ResultsInaccessible: the kernel refused to read or write.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        shard_items: int = 1000,
        facts: Mapping[str, str],
    ) -> None:
        if not 0 < shard_items <= _MAX_SHARD_ITEMS:
            raise ArgumentError(f"shard_items is {shard_items}; give 1 to {_MAX_SHARD_ITEMS:,}")
        self.folder = Path(folder)
        self._size = shard_items
        for name, value in facts.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise ArgumentError(f"the fact {name!r} is {value!r}; both must be text")
        self._facts = dict(facts)
        self._shards: dict[int, ShardProgress] = {}
        self._open_journals: dict[int, ShardProgress] = {}
        self._keys = KeyDigests()
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
        """Let the folder go, finished or not; a second call does nothing."""
        for shard in self._shards.values():
            shard.release()
        self._lock.release()

    def is_done(self, index: int, key: str) -> bool:
        """Tell whether an item's result is stored, by this run or one before; one that failed not.

        Args:
            index: the item's number, from 0.
            key: its name.

        Raises:
            ArgumentError: the number or the key cannot be one.
            DuplicateKey: another item has the same key.
            ResultsMismatch: the item had another key.
            ResultsCorrupt, ResultsInaccessible: of the files of its shard.
        """
        with accessing(self.folder):
            shard, place = self._locate(index, key)
            return shard.is_done(place)

    def add(self, index: int, key: str, arrays: Mapping[str, Array]) -> None:
        """Store an item's result. On return it would survive kill -9 of this process.

        With the last missing item of a shard the shard is written, and synchronised with its disk.

        Args:
            index: the item's number, from 0.
            key: its name.
            arrays: by name; without a slash. There need not be any.

        Raises:
            ArgumentError: the item is there already, or a name, dtype or shape cannot be one.
            ResultsInaccessible: no room, for instance. What is stored stays, perhaps with this
                item; a run that goes on later completes the shard.
            DuplicateKey, ResultsMismatch, ResultsCorrupt: as for `is_done`.
        """
        self._append(result(index, key, arrays, self._size))

    def fail(self, index: int, key: str, error: str) -> None:
        """Note that an item has no result. A later run tries it again.

        Args:
            index: the item's number, from 0.
            key: its name.
            error: why; of a long text the last 1,000 characters are stored.

        Raises:
            ArgumentError, DuplicateKey, ResultsMismatch, ResultsCorrupt, ResultsInaccessible: as
                for `add`.
        """
        self._append(failure(index, key, error, self._size))

    def finish(self, count: int) -> ResultsReport:
        """Write what is missing of shards and index, once each item was added or has failed.

        An item that failed in an earlier run must have been tried again.

        Args:
            count: how many items there are.

        Raises:
            ArgumentError: an item is missing.
            ResultsMismatch: the folder holds more items than there are.
            ResultsCorrupt, ResultsInaccessible: of the folder's files; can be repeated.
        """
        self._check_open()
        shards = -(-count // self._size)
        beyond = [number for number in self._there | set(self._shards) if number >= shards]
        if beyond:
            self._refuse_more(min(beyond) * self._size, count)
        nbytes = failed = 0
        with accessing(self.folder):
            for number in range(shards):
                shard = self._shard(number)
                self._complete(shard, min(self._size, count - shard.first), count)
                nbytes += shard.path.stat().st_size
                failed += shard.failures()
            if not self._has_index:
                write_index(self.folder, [shard_name(number) for number in range(shards)])
                self._has_index = True
        return ResultsReport(
            folder=str(self.folder),
            items=count,
            added=self._added,
            failed=failed,
            shards=shards,
            nbytes=nbytes,
        )

    def _check_open(self) -> None:
        if not self._lock.is_held:
            raise ArgumentError(f"{self.folder} was closed, or belongs to the parent process")

    def _check_folder(self) -> set[int]:
        """Write down or compare the facts; returns the numbers of the shards that are there."""
        names = os.listdir(self.folder)
        for name in filter(_LEFT_OVER.fullmatch, names):
            os.unlink(self.folder / name)
        ours = set(filter(_OURS.fullmatch, names))
        self._has_index = INDEX_NAME in ours
        facts = Facts(shard_items=self._size, facts=self._facts)
        check_facts(self.folder, facts, ours - {FACTS_NAME})
        return {int(name[6:].partition(".")[0]) for name in ours if name.startswith("shard-")}

    def _append(self, given: Given) -> None:
        head = given.head
        with accessing(self.folder):
            shard, place = self._locate(head.index, head.key)
            if shard.is_done(place):
                raise ArgumentError(f"item {head.index}, {head.key!r}, was added before")
            self._remove_index()
            self._use_journal(shard)
            shard.append(place, head, given.contents)
            self._added += head.error is None
            if shard.is_settled:
                self._commit(shard, self._size)

    def _remove_index(self) -> None:
        """Mark the folder as unfinished, before anything else in it changes."""
        if self._has_index:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / INDEX_NAME)
            self._has_index = False

    def _locate(self, index: int, key: str) -> tuple[ShardProgress, int]:
        """Return shard and place of an item, after a look at its key."""
        self._check_open()
        if index < 0:
            raise ArgumentError(f"an item cannot have the number {index}")
        shard, place = self._shard(index // self._size), index % self._size
        digest = digest_key(key)
        known = shard.keys[place]
        if known == 0:
            if not self._keys.add(digest):
                raise DuplicateKey(key, (self._find(digest), index))
            shard.keys[place] = digest
        elif known != digest:
            stored = shard.key_of(place)
            was = f"was {stored!r}" if stored else "had another key"
            raise ResultsMismatch(self.folder, f"item {index} {was} and is {key!r} now")
        return shard, place

    def _shard(self, number: int) -> ShardProgress:
        shard = self._shards.get(number)
        if shard is None:
            shard = ShardProgress(self.folder, number, self._size)
            for place, digest in enumerate(shard.keys):
                if digest and not self._keys.add(digest):
                    key = shard.key_of(place) or ""
                    shard.release()
                    raise DuplicateKey(key, (self._find(digest), shard.first + place))
            self._shards[number] = shard
        return shard

    def _find(self, digest: int) -> int:
        """Return the number of the item that has a key."""
        return next(
            (s.first + s.keys.index(digest) for s in self._shards.values() if digest in s.keys), -1
        )

    def _use_journal(self, shard: ShardProgress) -> None:
        """Keep the journals open that were used last."""
        self._open_journals.pop(shard.number, None)
        self._open_journals[shard.number] = shard
        if len(self._open_journals) > _MAX_OPEN_JOURNALS:
            self._open_journals.pop(next(iter(self._open_journals))).release()

    def _complete(self, shard: ShardProgress, size: int, count: int) -> None:
        """Commit a shard of which all items must be there."""
        missing = shard.missing(size)
        if missing >= 0:
            index = shard.first + missing
            raise ArgumentError(f"item {index} of {count} was neither added nor did it fail")
        if any(shard.keys[size:]):
            self._refuse_more(count, count)
        if shard.has_journal:
            self._commit(shard, size)

    def _commit(self, shard: ShardProgress, count: int) -> None:
        self._remove_index()
        shard.commit(count, self._facts)
        self._open_journals.pop(shard.number, None)

    def _refuse_more(self, index: int, count: int) -> None:
        raise ResultsMismatch(self.folder, f"it has an item {index}, but there are {count} now")
