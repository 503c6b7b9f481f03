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

from shmload._results.format import (
    AGAIN,
    Item,
    ResultsFormat,
    Stored,
    accessing,
)
from shmload._results.journal import Buffer, Journal
from shmload._results.names import digest_key, file_name, journal_name
from shmload.errors import ResultsCorrupt

_MISSING, _DONE, _FAILED, _FAILED_BEFORE = range(4)


class Shard:
    """Which items of one results file are done; an item is known by its number.

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
        self.first = number * size
        self.path = folder / file_name(number, format)
        self.keys = array("Q", bytes(8 * size))
        """Each item's key as a number; 0 if it is not known."""
        self._states = bytearray(size)
        self._format = format
        self._retry_failed = retry_failed
        self._has_file = self.path.exists()
        self._journal_path = folder / journal_name(number)
        self._journal: Journal | None = None
        errors = self._recall_file() if self._has_file else {}
        if self._journal_path.exists():
            self._recall_journal(errors)

    @property
    def is_settled(self) -> bool:
        """Tell whether every item is done, or has failed and is not tried again."""
        return self.missing(len(self._states)) < 0

    @property
    def has_journal(self) -> bool:
        """Tell whether there is anything to commit."""
        return self._journal is not None

    def is_done(self, index: int) -> bool:
        """Tell whether an item's result is stored."""
        return self._states[index - self.first] == _DONE

    def is_settled_at(self, index: int) -> bool:
        """Tell whether an item is done, or has failed and is not tried again."""
        return self._states[index - self.first] != _MISSING

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

    def append(self, index: int, item: Item, contents: Sequence[Buffer] = ()) -> None:
        """Store an item's result, its error, or a note that it was begun, in the journal.

        Raises:
            ResultsInaccessible: it cannot be written; the item is as it was.
        """
        with accessing(self._journal_path):
            self._journal = self._journal or Journal(self._journal_path)
            self._journal.append(index, item, contents)
        if not item.is_begun:
            self._states[index - self.first] = _DONE if item.error is None else _FAILED

    def commit(self, count: int, facts: Mapping[str, str]) -> None:
        """Write the file from the journal and the present file; then remove the journal.

        Args:
            count: how many items the file has.
            facts: what the results depend on.

        Raises:
            ResultsCorrupt: the journal or the file is not what was written.
            ResultsInaccessible: the file cannot be written; nothing has changed.
        """
        assert self._journal
        stored: dict[int, Stored] = {}
        with accessing(self.path), contextlib.ExitStack() as stack:
            if self._has_file:
                file = stack.enter_context(self._format.open(self.path))
                stored |= {
                    index: (item, file) for index, item in enumerate(file.items(), self.first)
                }
            stored |= {index: (item, self._journal) for index, item in self._journal.items.items()}
            items = [stored[index] for index in range(self.first, self.first + count)]
            self._format.write(self.path, self.first, items, facts)
        self._has_file = True
        self._remove_journal()

    def key_of(self, index: int) -> str | None:
        """Return the key under which an item is stored, or None."""
        if self._journal and index in self._journal.items:
            return self._journal.items[index].key
        if not self._has_file:
            return None
        keys = self._format.contents(self.path).keys
        return keys[index - self.first] if index - self.first < len(keys) else None

    def release(self) -> None:
        """Close the journal until it is next used."""
        if self._journal is not None:
            self._journal.release()

    def _recall_file(self) -> Mapping[int, str]:
        """Note which items the file has. Return the errors of those that failed, by number."""
        contents = self._format.contents(self.path)
        if contents.first != self.first or len(contents.keys) > len(self.keys):
            raise ResultsCorrupt(self.path, "it holds the items of another shard", AGAIN)
        for index, key in enumerate(contents.keys, self.first):
            self._recall(index, key, has_failed=index in contents.errors)
        return contents.errors

    def _recall_journal(self, errors: Mapping[int, str]) -> None:
        """Note the items that only the journal has, or a later result of."""
        self._journal = Journal(self._journal_path)
        self._journal.release()
        for index, item in list(self._journal.items.items()):
            if not 0 <= index - self.first < len(self.keys):
                raise ResultsCorrupt(self._journal_path, "it holds items of another shard", AGAIN)
            is_in_file = self._has_file and self.keys[index - self.first] != 0
            if is_in_file and (index not in errors or item.error is not None):
                del self._journal.items[index]
            else:
                self._recall(index, item.key, has_failed=item.error is not None)
        if self._has_file and not self._journal.items:
            self._remove_journal()

    def _recall(self, index: int, key: str, *, has_failed: bool) -> None:
        """Note what became of an item in an earlier run."""
        self.keys[index - self.first] = digest_key(key)
        if not has_failed:
            self._states[index - self.first] = _DONE
        elif not self._retry_failed:
            self._states[index - self.first] = _FAILED_BEFORE

    def _remove_journal(self) -> None:
        self.release()
        self._journal = None
        os.unlink(self._journal_path)
