"""How far the items of one results file are, and where their results are stored.

A finished results file has all of its items. While some are missing there is a journal too, with
the results that came since; once all are there, the file is written from both, and then the journal
is removed:

    nothing ──append──▶ journal ──commit──▶ file ──append──▶ file and journal ──commit──▶ file

The file gets its name in one step. A kill between the two steps leaves a journal beside a file that
has its items already; it is removed when they are next opened.
"""

import contextlib
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shmload.errors import ResultsCorrupt
from shmload.integrations._results.errors import AGAIN, accessing
from shmload.integrations._results.format import ResultsFormat, StoredArray, StoredItem
from shmload.integrations._results.journal import Buffer, Head, Journal
from shmload.integrations._results.keys import digest_key
from shmload.integrations._results.names import file_name, journal_name

_MISSING, _DONE, _FAILED, _FAILED_BEFORE = range(4)


class FileProgress:
    """Which items of one results file are done; an item is known by its place in it, from 0.

    Args:
        folder: of all results.
        number: of the file.
        size: how many items a file has, at most.
        format: of the file.
        retry_failed: items that failed in an earlier run count as missing.

    Raises:
        ResultsCorrupt: a file is not what was written.
        OSError: a file cannot be read.
    """

    def __init__(
        self, folder: Path, number: int, size: int, format: ResultsFormat, *, retry_failed: bool
    ) -> None:
        self.number = number
        self._format = format
        self.first = number * size
        self.path = folder / file_name(number, format)
        self.keys = array("Q", bytes(8 * size))
        """Each item's key as a number; 0 if it is not known."""
        self._states = bytearray(size)
        self._settled = 0
        self._retry_failed = retry_failed
        self._failed_in_file: frozenset[int] = frozenset()
        """Places of the items that the file had as failed when it was looked at."""
        self._journal_path = folder / journal_name(number)
        self._journal: Journal | None = None
        # Offset of each item's record in the journal; 0 if it has none. Empty without a journal.
        self._offsets = array("Q")
        self._has_file = self.path.exists()
        self._load()

    @property
    def is_settled(self) -> bool:
        """Tell whether every item is done, or has failed and is not tried again."""
        return self._settled == len(self._states)

    @property
    def has_journal(self) -> bool:
        """Tell whether there is anything to commit."""
        return self._journal is not None

    def is_done(self, place: int) -> bool:
        """Tell whether an item's result is stored."""
        return self._states[place] == _DONE

    def is_settled_at(self, place: int) -> bool:
        """Tell whether an item is done, or has failed and is not tried again."""
        return self._states[place] != _MISSING

    def missing(self, count: int) -> int:
        """Return the first place below `count` whose item is neither done nor failed, or -1."""
        return self._states.find(_MISSING, 0, count)

    def failures(self) -> tuple[int, int]:
        """Return how many items failed in this run, and how many failed before and stay so."""
        return self._states.count(_FAILED), self._states.count(_FAILED_BEFORE)

    def entries(self) -> Iterator[tuple[int, bool]]:
        """Yield each item's key as a number, and whether it failed, up to the last known key."""
        for key, state in zip(self.keys, self._states, strict=True):
            if key:
                yield key, state in (_FAILED, _FAILED_BEFORE)

    def append(self, place: int, head: Head, contents: Sequence[Buffer]) -> None:
        """Store an item's result, or its error, in the journal.

        Raises:
            ResultsInaccessible: it cannot be written; the item is as it was.
        """
        with accessing(self._journal_path):
            if self._journal is None:
                self._open_journal()
            assert self._journal
            self._offsets[place] = self._journal.append(head, contents)
        self._settle(place, _DONE if head.error is None else _FAILED)

    def note(self, head: Head) -> None:
        """Write down the key of an item that was begun and is not settled.

        Raises:
            ResultsInaccessible: it cannot be written; the item is as it was.
        """
        with accessing(self._journal_path):
            if self._journal is None:
                self._open_journal()
            assert self._journal
            self._journal.append(head, ())

    def commit(self, count: int, facts: Mapping[str, str]) -> None:
        """Write the file from the journal and the present file; then remove the journal.

        Args:
            count: how many items the file has.
            facts: what the results depend on.

        Raises:
            ResultsCorrupt: the journal or the file is not what was written.
            ResultsInaccessible: the file cannot be written; nothing has changed.
        """
        with accessing(self.path), contextlib.ExitStack() as stack:
            before: list[StoredItem] = []
            if self._has_file:
                before = stack.enter_context(self._format.open(self.path)).items()
            items = [self._item(place, before) for place in range(count)]
            self._format.write(self.path, self.first, items, facts)
        self._has_file = True
        self._remove_journal()

    def key_of(self, place: int) -> str | None:
        """Return the key under which an item is stored, or None."""
        if self._offsets and self._offsets[place]:
            return self._record(place)[0].key
        if not self._has_file:
            return None
        keys = self._format.read_contents(self.path).keys
        return keys[place] if place < len(keys) else None

    def release(self) -> None:
        """Close the journal until it is next used."""
        if self._journal is not None:
            self._journal.release()

    def _load(self) -> None:
        if self._has_file:
            contents = self._format.read_contents(self.path)
            if contents.first != self.first or len(contents.keys) > len(self.keys):
                raise ResultsCorrupt(self.path, "it holds the items of another shard", AGAIN)
            self._failed_in_file = frozenset(index - self.first for index in contents.errors)
            for place, key in enumerate(contents.keys):
                self.keys[place] = digest_key(key)
                self._recall(place, is_error=place in self._failed_in_file)
        if self._journal_path.exists():
            self._open_journal()
            self.release()
            if self._has_file and not any(self._offsets):
                self._remove_journal()

    def _open_journal(self) -> None:
        self._offsets = array("Q", bytes(8 * len(self.keys)))
        self._journal = Journal(self._journal_path, self._found)

    def _found(self, offset: int, head: Head) -> None:
        """Note a record that is there already; its item may be in the file too."""
        place = head.index - self.first
        if not 0 <= place < len(self.keys):
            raise ResultsCorrupt(self._journal_path, "it holds items of another shard", AGAIN)
        if head.is_begun:
            return
        if self._has_file and not self._offsets[place]:
            is_same_failure = head.error is not None and place in self._failed_in_file
            if self.is_done(place) or is_same_failure:
                return
        self.keys[place] = digest_key(head.key)
        self._offsets[place] = offset
        self._recall(place, is_error=head.error is not None)

    def _recall(self, place: int, *, is_error: bool) -> None:
        """Note what became of an item in an earlier run."""
        if not is_error:
            self._settle(place, _DONE)
        elif not self._retry_failed:
            self._settle(place, _FAILED_BEFORE)

    def _settle(self, place: int, state: int) -> None:
        self._settled += self._states[place] == _MISSING
        self._states[place] = state

    def _item(self, place: int, before: Sequence[StoredItem]) -> StoredItem:
        if not self._offsets[place]:
            return before[place]
        head, offset = self._record(place)
        assert self._journal
        arrays = []
        for a in head.arrays:
            arrays.append(
                StoredArray(a.name, a.dtype, a.shape, a.nbytes, self._journal, offset, a.digest)
            )
            offset += a.nbytes
        return StoredItem(head.key, head.error, tuple(arrays))

    def _record(self, place: int) -> tuple[Head, int]:
        assert self._journal
        found = self._journal.read(self._offsets[place])
        if found is None or found[0].index != self.first + place:
            reason = f"the record of item {self.first + place} is not what was written"
            raise ResultsCorrupt(self._journal_path, reason, AGAIN)
        return found

    def _remove_journal(self) -> None:
        self.release()
        self._journal = None
        self._offsets = array("Q")
        os.unlink(self._journal_path)
