"""Results of a folder, read back by key or by place, and the order of the items that it has."""

import mmap
import operator
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec
import numpy as np

from shmload._checkpoints.dtypes import NBITS
from shmload._host.descriptors import Inode, inode_of
from shmload._host.files import plain_only
from shmload._loading.state_dict import as_tensor, torch_dtypes
from shmload._results.format import accessing
from shmload._results.index import LINES
from shmload._results.journal import Array, read_records
from shmload._results.names import (
    INDEX_NAME,
    digest_key,
    format_of,
    is_journal,
    number_of,
)
from shmload.errors import (
    ArgumentError,
    ResultsChanged,
    ResultsCorrupt,
    ResultsMismatch,
    ResultsUnfinished,
    UnknownDtype,
)

if TYPE_CHECKING:
    import torch


class _Name(msgspec.Struct, frozen=True):
    """The part of a line that identifies its item; msgspec skips the rest."""

    key: str
    error: str | None = None


_NAMES = msgspec.json.Decoder(_Name)


class Results:
    """The results in a finished folder, by key or by place; a data set for torch's DataLoader.

    Failed items are left out. An item's bytes are read when it is asked for, into memory of its
    own. No file of the folder stays open; only the index is mapped. Pickling keeps the folder's
    path: unpickling opens it again. Several threads may use it.

    Args:
        folder: with an index.

    Raises:
        ResultsUnfinished: there is no index.
        ResultsChanged: a job has changed the folder meanwhile.
        ResultsCorrupt: the index or the last results file is not what was written.
        ResultsInaccessible: one of them cannot be read.
        ArgumentError: the folder is a file, or the library of its format is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._path = self.folder / INDEX_NAME
        self._lines: mmap.mmap | bytes = b""
        self.errors: dict[str, str] = {}
        """Why items failed, by key."""
        with accessing(self._path):
            self._open()
        # Of the items that did not fail; a place counts from 0.
        self._begins = array("Q")
        digests = array("Q")
        for begin, name in self._read_names():
            if name.error is None:
                self._begins.append(begin)
                digests.append(digest_key(name.key))
            else:
                self.errors[name.key] = name.error
        with accessing(self.folder):
            self._check_length(len(self._begins) + len(self.errors))
        unsorted = np.array(digests, np.uint64)
        self._order = np.argsort(unsorted)
        self._digests = unsorted[self._order]

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in item order."""
        return (self._key_at(place) for place in range(len(self)))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __repr__(self) -> str:
        failed = f", {len(self.errors)} failed" if self.errors else ""
        return f"Results({str(self.folder)!r}): {len(self)} items{failed}"

    @overload
    def __getitem__(self, item: int | str) -> "dict[str, torch.Tensor]": ...

    @overload
    def __getitem__(self, item: slice) -> "list[dict[str, torch.Tensor]]": ...

    def __getitem__(
        self, item: int | str | slice
    ) -> "dict[str, torch.Tensor] | list[dict[str, torch.Tensor]]":
        """Return the tensors of an item by name, each with memory of its own.

        Args:
            item: its key, or its place among the items that did not fail. A slice of places gives
                a list.

        Raises:
            KeyError, IndexError: there is no such item, or it has failed: then with its error.
            TypeError: it is neither a key nor a place.
            UnknownDtype: torch has no such dtype; `read` returns the bytes.
            ResultsChanged, ResultsCorrupt, ResultsInaccessible: as for `read`.
        """
        if isinstance(item, slice):
            return [self[place] for place in range(*item.indices(len(self)))]
        dtypes = torch_dtypes()
        tensors = {}
        for name, (dtype, shape, content) in self.read(item).items():
            if dtype not in dtypes:
                raise UnknownDtype(dtype, dtypes)
            assert isinstance(content, bytearray)
            tensors[name] = as_tensor(content, dtypes[dtype], shape, NBITS[dtype])
        return tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def keys(self) -> Iterator[str]:
        """Yield the keys in item order."""
        return iter(self)

    def items(self) -> "Iterator[tuple[str, dict[str, torch.Tensor]]]":
        """Yield key and tensors of each item, in item order."""
        for place, key in enumerate(self):
            yield key, self[place]

    def read(self, item: int | str) -> dict[str, Array]:
        """Return the arrays of an item by name, as bytes, without torch.

        Args:
            item: its key, or its place among the items that did not fail.

        Raises:
            KeyError, IndexError, TypeError: as for `results[item]`.
            ArgumentError: the library of the folder's format is not installed.
            ResultsChanged: a job has changed the folder since it was opened.
            ResultsCorrupt: a file is not what was written.
            ResultsInaccessible: a file cannot be read.
        """
        line = LINES.decode(self._line_at(self._begins[self._place_of(item)]))
        if not line.arrays:
            return {}
        path = self.folder / line.shard
        with accessing(path), format_of(line.shard).open(path) as file:
            # After the open: so it is the results file that the index describes.
            self._check_unchanged()
            return {
                name: Array(place.dtype, place.shape, bytearray(file.read(place)))
                for name, place in line.arrays.items()
            }

    def _place_of(self, item: int | str) -> int:
        """Return the place of an item that is there."""
        if isinstance(item, str):
            place = self._find(item)
            if place is None:
                error = self.errors.get(item)
                raise KeyError(item if error is None else f"{item!r} failed: {error}")
            return place
        try:
            place = operator.index(item)
        except TypeError as exc:
            raise TypeError(
                f"{item!r} is a {type(item).__name__}; give a key, which is text, or a place"
            ) from exc
        if not -len(self) <= place < len(self):
            raise IndexError(f"there is no place {place}; {self.folder} has {len(self)} results")
        return place

    def _find(self, key: str) -> int | None:
        """Return the place of a key, or None."""
        try:
            digest = np.uint64(digest_key(key))
        except ArgumentError:
            return None
        at = int(np.searchsorted(self._digests, digest))
        while at < len(self) and self._digests[at] == digest:
            place = int(self._order[at])
            if self._key_at(place) == key:
                return place
            at += 1
        return None

    # The index ------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            file = open(self._path, "rb", opener=plain_only)  # noqa: SIM115 closed below
        except FileNotFoundError as exc:
            raise ResultsUnfinished(self.folder, exists=self.folder.exists()) from exc
        except NotADirectoryError as exc:
            raise ArgumentError(f"{self.folder} is a file; give the folder of results") from exc
        with file:
            status = os.fstat(file.fileno())
            if status.st_size:
                self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._version = _version(status)

    def _read_names(self) -> Iterator[tuple[int, _Name]]:
        begin = 0
        try:
            while begin < len(self._lines):
                line = self._line_at(begin)
                yield begin, _NAMES.decode(line)
                begin += len(line)
        except msgspec.DecodeError as exc:
            raise self._damaged(str(exc)) from exc

    def _line_at(self, begin: int) -> bytes:
        end = self._lines.find(b"\n", begin) + 1
        if end == 0:
            raise self._damaged("its last line is not whole")
        return self._lines[begin:end]

    def _key_at(self, place: int) -> str:
        return _NAMES.decode(self._line_at(self._begins[place])).key

    def _check_length(self, count: int) -> None:
        """Raise an error if the last results file has items beyond this number of lines."""
        files = {
            number: name
            for name in os.listdir(self.folder)
            if (number := number_of(name)) is not None and not is_journal(name)
        }
        if not files:
            return
        name = files[max(files)]
        contents = format_of(name).contents(self.folder / name)
        if count < (wanted := contents.first + len(contents.keys)):
            self._check_unchanged()  # a job may have changed the folder meanwhile
            raise self._damaged(f"it has {count} lines for {wanted} items")

    def _check_unchanged(self) -> None:
        """Raise an error if the folder has another index by now, or none."""
        if not self._path.exists() or _version(os.stat(self._path)) != self._version:
            raise ResultsChanged(self.folder)

    def _damaged(self, reason: str) -> ResultsCorrupt:
        return ResultsCorrupt(self._path, reason, "remove it and run the job again")


def _version(status: os.stat_result) -> tuple[Inode, int]:
    return inode_of(status), status.st_mtime_ns


# The order of items -------------------------------------------------------------------------------


def continued_order(folder: str | os.PathLike[str], keys: Sequence[str]) -> list[str]:
    """Return the keys of all items in an order with which a folder can be continued.

    `dataprep.write` takes an item only at the number that it had before. So a key that the folder
    has keeps its number, even if it is not given any more. The others follow in their order: first
    at numbers that have no result yet, then at the end. With the keys of the run before, in their
    order, the order is the same again.

    A run that was killed may have begun an item that is gone now, and stored one behind it. If
    there is no new item for its number, its key is in the order: the item will fail.

    Nothing is changed.

    Args:
        folder: of results; need not exist.
        keys: of the items that there are now. New ones are taken in this order.

    Raises:
        ResultsMismatch: an item without a result is gone, there is no new one for its number, and
            the folder does not have its key: the run did not begin it with `is_settled`.
        ResultsCorrupt: a file is not what was written.
        ResultsInaccessible: a file cannot be read.
    """
    with accessing(folder):
        known, begun = _known_keys(Path(folder))
    count = max(known, default=-1) + 1
    # What was begun keeps its number too, while it is there.
    there = set(keys).difference(known.values())
    for number, name in begun.items():
        if number < count and name in there:
            known[number] = name
            there.remove(name)
    taken = set(known.values())
    new = iter([key for key in keys if key not in taken])
    order = []
    for number in range(count):
        key = known[number] if number in known else next(new, None)
        if key is None and begun.get(number) not in taken:
            key = begun.get(number)  # it is gone, and nothing new is left for its number
        if key is None:
            reason = (
                f"it has an item {count - 1}, but item {number} has no result and is not there now"
            )
            raise ResultsMismatch(folder, reason)
        order.append(key)
        taken.add(key)
    return [*order, *new]


def _known_keys(folder: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return keys by number: of items that have a result or an error, and of those only begun."""
    known: dict[int, str] = {}
    begun: dict[int, str] = {}
    for name in os.listdir(folder) if folder.exists() else ():
        if number_of(name) is None:
            continue
        if is_journal(name):
            with open(folder / name, "rb", opener=plain_only) as file:
                for index, item, _ in read_records(file.fileno()):
                    (begun if item.is_begun else known)[index] = item.key
        else:
            contents = format_of(name).contents(folder / name)
            known |= dict(enumerate(contents.keys, contents.first))
    return known, {number: key for number, key in begun.items() if number not in known}
