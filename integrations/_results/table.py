"""All items of a folder of results: in which results file each is, and which keys are taken."""

from pathlib import Path

from shmload.errors import ArgumentError, DuplicateKey, ResultsMismatch
from shmload.integrations._results.format import ResultsFormat
from shmload.integrations._results.keys import KeyDigests, digest_key
from shmload.integrations._results.progress import FileProgress

_MAX_OPEN_JOURNALS = 16


class ItemTable:
    """The items of a folder. A results file is looked at when an item of it is first asked for.

    Args:
        folder: of the results; the caller has its lock.
        size: how many items a results file has, at most.
        format: of the results files.
        retry_failed: items that failed in an earlier run count as missing.
    """

    def __init__(
        self, folder: Path, size: int, format: ResultsFormat, *, retry_failed: bool
    ) -> None:
        self._folder = folder
        self._format = format
        self._retry_failed = retry_failed
        self._size = size
        self._files: dict[int, FileProgress] = {}
        self._open_journals: dict[int, FileProgress] = {}
        """Files whose journals may be open; the one used last is at the end."""
        self._keys = KeyDigests()

    @property
    def numbers(self) -> set[int]:
        """The numbers of the results files that were looked at."""
        return set(self._files)

    def locate(self, index: int, key: str) -> tuple[FileProgress, int]:
        """Return the file of an item and its place in it; the key is the item's from now on.

        Raises:
            ArgumentError: the number or the key cannot be one.
            DuplicateKey: another item has the same key.
            ResultsMismatch: the item had another key.
            ResultsCorrupt: as `file`.
            OSError: as `file`.
        """
        if index < 0:
            raise ArgumentError(f"an item cannot have the number {index}")
        file, place = self.file(index // self._size), index % self._size
        digest = digest_key(key)
        known = file.keys[place]
        if known == 0:
            if not self._keys.add(digest):
                raise DuplicateKey(key, (self._find(digest), index))
            file.keys[place] = digest
        elif known != digest:
            stored = file.key_of(place)
            was = f"was {stored!r}" if stored else "had another key"
            raise ResultsMismatch(self._folder, f"item {index} {was} and is {key!r} now")
        return file, place

    def file(self, number: int) -> FileProgress:
        """Return a results file, which need not exist yet.

        Raises:
            DuplicateKey: it has a key that another file has too.
            ResultsCorrupt: the file or its journal is not what was written.
            OSError: one of them cannot be read.
        """
        file = self._files.get(number)
        if file is None:
            file = FileProgress(
                self._folder, number, self._size, self._format, retry_failed=self._retry_failed
            )
            for place, digest in enumerate(file.keys):
                if digest and not self._keys.add(digest):
                    key = file.key_of(place) or ""
                    file.release()
                    raise DuplicateKey(key, (self._find(digest), file.first + place))
            self._files[number] = file
        return file

    def use_journal(self, file: FileProgress) -> None:
        """Note that a file's journal is about to be used; the one unused longest is closed."""
        self._open_journals.pop(file.number, None)
        self._open_journals[file.number] = file
        if len(self._open_journals) > _MAX_OPEN_JOURNALS:
            self._open_journals.pop(next(iter(self._open_journals))).release()

    def forget_journal(self, file: FileProgress) -> None:
        """Note that a file's journal is gone."""
        self._open_journals.pop(file.number, None)

    def release(self) -> None:
        """Close all journals until they are next used."""
        for file in self._files.values():
            file.release()

    def _find(self, digest: int) -> int:
        """Return the number of the item that has a key, or -1."""
        return next(
            (f.first + f.keys.index(digest) for f in self._files.values() if digest in f.keys), -1
        )
