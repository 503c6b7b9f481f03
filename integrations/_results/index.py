"""The index of a folder of results, and how results are read back.

A line for each item, in item order, says where its arrays are: reading one takes neither a search
nor the header of its shard. The index is removed before anything else in the folder changes; so
what it says is true for as long as it is there.
"""

import mmap
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shmload._checkpoints.dtypes import NBITS
from shmload._host.files import replacing
from shmload._host.linux import Inode, inode_of
from shmload._loading.state_dict import as_tensor, torch_dtypes
from shmload.errors import (
    ArgumentError,
    ResultsChanged,
    ResultsCorrupt,
    ResultsUnfinished,
    UnknownDtype,
)
from shmload.integrations._results.items import Array
from shmload.integrations._results.keys import digest_key
from shmload.integrations._results.shards import Item, accessing, read_items

if TYPE_CHECKING:
    import torch

INDEX_NAME = "index.jsonl"

_AGAIN = "remove it and run the job again"


class _Place(msgspec.Struct, frozen=True, gc=False):
    """Where an array is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the shard's file."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        nbits = NBITS[self.dtype]
        for size in self.shape:
            nbits *= size
        return nbits // 8


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the index says of an item."""

    key: str
    shard: str = ""
    """The name of its file."""
    arrays: dict[str, _Place] | None = None
    error: str | None = None
    """Why it failed; the two others are missing then."""


class _Name(msgspec.Struct, frozen=True):
    """The part of a line that tells which item it is of; the rest is skipped."""

    key: str
    error: str | None = None


_ENCODER = msgspec.json.Encoder()
_LINES = msgspec.json.Decoder(_Line)
_NAMES = msgspec.json.Decoder(_Name)


def write_index(folder: Path, shards: Sequence[str]) -> None:
    """Write the index of some shards, all that there are.

    Args:
        folder: of the results.
        shards: names of files in it, in their order.

    Raises:
        ResultsCorrupt: a shard is not what was written.
        OSError: the index cannot be written, or a shard not be read.
    """
    with replacing(folder / INDEX_NAME, durable=True) as file:
        for shard in shards:
            fd = os.open(folder / shard, os.O_RDONLY)
            try:
                items = read_items(fd, folder / shard)
            finally:
                os.close(fd)
            file.writelines(_ENCODER.encode(_line(item, shard)) + b"\n" for item in items)


def _line(item: Item, shard: str) -> _Line:
    if item.error is not None:
        return _Line(key=item.key, error=item.error)
    places = {piece.name: _Place(piece.dtype, piece.shape, piece.offset) for piece in item.pieces}
    return _Line(key=item.key, shard=shard, arrays=places)


class Results:
    """The results in a finished folder, by key or by place; a data set for torch's DataLoader.

    Failed items are left out. An item's bytes are read when it is asked for, into memory of its
    own; no file of the folder stays open, and only the index is mapped. It can be pickled: the
    folder is then opened anew. Several threads may use it.

    Args:
        folder: with an index.

    Raises:
        ResultsUnfinished: there is no index.
        ResultsCorrupt: the index is not what was written.
        ResultsInaccessible: it cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.errors: dict[str, str] = {}
        """Why items failed, by key."""
        self._index: mmap.mmap | bytes = b""
        self._begins = array("Q")
        digests = array("Q")
        with accessing(self._path):
            self._open_index()
        for begin, name in self._read_names():
            if name.error is None:
                self._begins.append(begin)
                digests.append(digest_key(name.key))
            else:
                self.errors[name.key] = name.error
        unsorted = np.array(digests, np.uint64)
        self._order = np.argsort(unsorted)
        self._digests = unsorted[self._order]

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in item order."""
        for begin in self._begins:
            yield _NAMES.decode(self._line_at(begin)).key

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __getitem__(self, item: int | str) -> "dict[str, torch.Tensor]":
        """Return the tensors of an item by name, each with memory of its own.

        Args:
            item: its key, or its place among those that did not fail.

        Raises:
            KeyError, IndexError: there is no such item.
            UnknownDtype: torch has no such dtype; `read` returns the bytes.
            ResultsChanged, ResultsCorrupt, ResultsInaccessible: as for `read`.
        """
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
            item: its key, or its place among those that did not fail.

        Raises:
            KeyError, IndexError: there is no such item.
            ResultsChanged: a job has changed the folder since it was opened.
            ResultsCorrupt: a file is not what was written.
            ResultsInaccessible: a file cannot be read.
        """
        if isinstance(item, str):
            place = self._find(item)
            if place is None:
                raise KeyError(item)
        else:
            place = item
        line = _LINES.decode(self._line_at(self._begins[place]))
        path = self.folder / line.shard
        with accessing(path):
            if not line.arrays:
                return {}
            fd = os.open(path, os.O_RDONLY)
            try:
                # In this order: the shard that was opened is the one that the index speaks of.
                self._check_index()
                return {name: _read(fd, path, where) for name, where in line.arrays.items()}
            finally:
                os.close(fd)

    @property
    def _path(self) -> Path:
        return self.folder / INDEX_NAME

    def _open_index(self) -> None:
        try:
            file = open(self._path, "rb")  # noqa: SIM115 closed below
        except FileNotFoundError as exc:
            raise ResultsUnfinished(self.folder) from exc
        with file:
            found = os.fstat(file.fileno())
            if found.st_size:
                self._index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._version = (inode_of(found), found.st_mtime_ns)

    def _check_index(self) -> None:
        version: tuple[Inode, int] | None = None
        if self._path.exists():
            found = os.stat(self._path)
            version = (inode_of(found), found.st_mtime_ns)
        if version != self._version:
            raise ResultsChanged(self.folder)

    def _read_names(self) -> Iterator[tuple[int, _Name]]:
        begin = 0
        try:
            while begin < len(self._index):
                line = self._line_at(begin)
                yield begin, _NAMES.decode(line)
                begin += len(line)
        except msgspec.DecodeError as exc:
            raise ResultsCorrupt(self._path, str(exc), _AGAIN) from exc

    def _line_at(self, begin: int) -> bytes:
        end = self._index.find(b"\n", begin) + 1
        if end == 0:
            raise ResultsCorrupt(self._path, "its last line is not whole", _AGAIN)
        return self._index[begin:end]

    def _find(self, key: str) -> int | None:
        try:
            digest = np.uint64(digest_key(key))
        except ArgumentError:
            return None
        place = int(np.searchsorted(self._digests, digest))
        while place < len(self._digests) and self._digests[place] == digest:
            found = int(self._order[place])
            if _NAMES.decode(self._line_at(self._begins[found])).key == key:
                return found
            place += 1
        return None


def _read(fd: int, path: Path, where: _Place) -> Array:
    content = bytearray(where.nbytes)
    view, offset = memoryview(content), where.offset
    while view:
        got = os.preadv(fd, [view], offset)
        if got == 0:
            raise ResultsCorrupt(path, "it ends too early", _AGAIN)
        view, offset = view[got:], offset + got
    return Array(where.dtype, where.shape, content)
