"""The index of a folder of results: where the arrays of each item are.

A line for each item, in item order. With it an item is read without a search, and without the
header of its results file. The index is removed before anything else in the folder changes. So it
is right for as long as it is there, unless something else than a job has changed it: a job compares
it with the results files, and a reader at least its length.
"""

import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from shmload._checkpoints.dtypes import NBITS
from shmload._host.files import plain_only, replacing
from shmload._host.linux import Inode, inode_of
from shmload.errors import ArgumentError, ResultsChanged, ResultsCorrupt, ResultsUnfinished
from shmload.integrations._results.errors import accessing
from shmload.integrations._results.format import StoredItem
from shmload.integrations._results.keys import digest_key
from shmload.integrations._results.names import (
    INDEX_NAME,
    format_of,
    is_journal,
    number_of,
)


class ArrayPlace(msgspec.Struct, frozen=True, gc=False):
    """Where an array is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the results file, or what else the format finds it by."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        nbits = NBITS[self.dtype]
        for size in self.shape:
            nbits *= size
        return nbits // 8


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the index says of an item."""

    key: str
    file: str = msgspec.field(default="", name="shard")
    """The name of its results file."""
    arrays: dict[str, ArrayPlace] | None = None
    error: str | None = None
    """Why it failed; then it has neither file nor arrays."""


class _Name(msgspec.Struct, frozen=True):
    """The part of a line that identifies its item; msgspec skips the rest."""

    key: str
    error: str | None = None


_ENCODER = msgspec.json.Encoder()
_LINES = msgspec.json.Decoder(Line)
_NAMES = msgspec.json.Decoder(_Name)


def write_index(folder: Path, files: Sequence[str]) -> None:
    """Write the index of a folder.

    Args:
        folder: of the results.
        files: names of all its results files, in their order.

    Raises:
        ResultsCorrupt: a results file is not what was written.
        ResultsInaccessible: the index cannot be written, or a results file not be read.
    """
    path = folder / INDEX_NAME
    with accessing(path), replacing(path, durable=True) as index:
        for name in files:
            with format_of(name).open(folder / name) as file:
                items = file.items()
            index.writelines(_ENCODER.encode(_line(item, name)) + b"\n" for item in items)


def is_index_of(folder: Path, items: Iterable[tuple[str, int, bool]]) -> bool:
    """Tell whether the index of a folder has a whole line for each item, and no other line.

    Offsets, dtypes and shapes are not compared: no results file is read.

    Args:
        folder: of the results.
        items: name of the results file, digest of the key and whether it failed, in item order.

    Raises:
        ResultsInaccessible: the index cannot be read.
    """
    path = folder / INDEX_NAME
    with accessing(path), open(path, "rb", opener=plain_only) as index:
        try:
            return all(_is_line_of(*pair) for pair in zip(index, items, strict=True))
        except ValueError:  # of `zip`; msgspec's errors are among them
            return False


def _is_line_of(raw: bytes, item: tuple[str, int, bool]) -> bool:
    line = _LINES.decode(raw)
    found = ("" if line.error is not None else line.file, digest_key(line.key))
    file, digest, has_failed = item
    return raw.endswith(b"\n") and found == ("" if has_failed else file, digest)


def _line(item: StoredItem, file: str) -> Line:
    if item.error is not None:
        return Line(key=item.key, error=item.error)
    places = {each.name: ArrayPlace(each.dtype, each.shape, each.place) for each in item.arrays}
    return Line(key=item.key, file=file, arrays=places)


class Index:
    """The index of a folder as it is now, mapped. Items that failed are left out.

    Places count from 0. Several threads may use it.

    Args:
        folder: of the results.

    Raises:
        ResultsUnfinished: there is no index.
        ResultsChanged: a job has changed the folder meanwhile.
        ResultsCorrupt: it or the last results file is not what was written.
        ResultsInaccessible: one of them cannot be read.
        ArgumentError: the folder is a file, or the library of its format is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / INDEX_NAME
        self._content: mmap.mmap | bytes = b""
        self._begins = array("Q")
        digests = array("Q")
        errors: dict[str, str] = {}
        with accessing(self._path):
            self._open()
        for begin, name in self._read_names():
            if name.error is None:
                self._begins.append(begin)
                digests.append(digest_key(name.key))
            else:
                errors[name.key] = name.error
        self._check_length(len(self._begins) + len(errors))
        self.errors: Mapping[str, str] = errors
        """Why items failed, by key."""
        unsorted = np.array(digests, np.uint64)
        self._order = np.argsort(unsorted)
        self._digests = unsorted[self._order]

    def __len__(self) -> int:
        return len(self._begins)

    def keys(self) -> Iterator[str]:
        """Yield the keys in item order."""
        for begin in self._begins:
            yield _NAMES.decode(self._line_at(begin)).key

    def find(self, key: str) -> int | None:
        """Return the place of a key, or None."""
        try:
            digest = np.uint64(digest_key(key))
        except ArgumentError:
            return None
        at = int(np.searchsorted(self._digests, digest))
        while at < len(self._digests) and self._digests[at] == digest:
            place = int(self._order[at])
            if _NAMES.decode(self._line_at(self._begins[place])).key == key:
                return place
            at += 1
        return None

    def line(self, place: int) -> Line:
        """Return the line of an item.

        Raises:
            IndexError: there is no such place.
        """
        return _LINES.decode(self._line_at(self._begins[place]))

    def check(self) -> None:
        """Raise an error if the folder has another index by now.

        Raises:
            ResultsChanged: it was removed or replaced.
            OSError: its file cannot be seen.
        """
        version: tuple[Inode, int] | None = None
        if self._path.exists():
            version = _version(os.stat(self._path))
        if version != self._version:
            raise ResultsChanged(self._folder)

    def _open(self) -> None:
        try:
            file = open(self._path, "rb", opener=plain_only)  # noqa: SIM115 closed below
        except FileNotFoundError as exc:
            raise ResultsUnfinished(self._folder, exists=self._folder.exists()) from exc
        except NotADirectoryError as exc:
            raise ArgumentError(f"{self._folder} is a file; give the folder of results") from exc
        with file:
            status = os.fstat(file.fileno())
            if status.st_size:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._version = _version(status)

    def _read_names(self) -> Iterator[tuple[int, _Name]]:
        begin = 0
        try:
            while begin < len(self._content):
                line = self._line_at(begin)
                yield begin, _NAMES.decode(line)
                begin += len(line)
        except msgspec.DecodeError as exc:
            raise self._damaged(str(exc)) from exc

    def _check_length(self, count: int) -> None:
        """Raise an error if the last results file has items beyond this number of lines."""
        with accessing(self._folder):
            files = {
                number: name
                for name in os.listdir(self._folder)
                if (number := number_of(name)) is not None and not is_journal(name)
            }
            if not files:
                return
            name = files[max(files)]
            contents = format_of(name).read_contents(self._folder / name)
            if count < (wanted := contents.first + len(contents.keys)):
                self.check()  # a job may have changed the folder meanwhile
                raise self._damaged(f"it has {count} lines for {wanted} items")

    def _line_at(self, begin: int) -> bytes:
        end = self._content.find(b"\n", begin) + 1
        if end == 0:
            raise self._damaged("its last line is not whole")
        return self._content[begin:end]

    def _damaged(self, reason: str) -> ResultsCorrupt:
        return ResultsCorrupt(self._path, reason, "remove it and run the job again")


def _version(status: os.stat_result) -> tuple[Inode, int]:
    return inode_of(status), status.st_mtime_ns
