"""Results of a finished folder, read back by key or by place."""

import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from shmload._checkpoints.dtypes import NBITS
from shmload._loading.state_dict import as_tensor, torch_dtypes
from shmload.errors import UnknownDtype
from shmload.integrations._results.errors import accessing
from shmload.integrations._results.index import Index
from shmload.integrations._results.items import Array
from shmload.integrations._results.names import format_of

if TYPE_CHECKING:
    import torch


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
        self._index = Index(self.folder)
        self.errors = dict(self._index.errors)
        """Why items failed, by key."""

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in item order."""
        return self._index.keys()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._index.find(key) is not None

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
        line = self._index.line(self._place_of(item))
        path = self.folder / line.file
        with accessing(path):
            if not line.arrays:
                return {}
            with format_of(line.file).open(path) as file:
                # After the open: so it is the results file that the index describes.
                self._index.check()
                return {
                    name: Array(at.dtype, at.shape, file.read(at.offset, at.nbytes))
                    for name, at in line.arrays.items()
                }

    def _place_of(self, item: int | str) -> int:
        """Return the place of an item that is there."""
        if isinstance(item, str):
            place = self._index.find(item)
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
