"""What shmload must know of a format of results files, and what such a file holds.

A format is one module that makes a `ResultsFormat`, and its entry in `names.FORMATS`.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol, Self

import msgspec
import xxhash

from shmload.errors import ArgumentError, ResultsCorrupt
from shmload.integrations._results.errors import AGAIN
from shmload.integrations._results.journal import Head

Path = str | os.PathLike[str]


class ArraySource(Protocol):
    """An open file that holds arrays."""

    @property
    def path(self) -> Path:
        """Path of the file."""
        ...

    def blocks(self, place: int, nbytes: int) -> Iterator[memoryview]:
        """Yield an array's bytes, or as many as there are; each block is valid until the next.

        Args:
            place: where the array is, in the file's own terms.
            nbytes: its size.
        """
        ...


class StoredArray(NamedTuple):
    """One array of an item, in a file."""

    name: str
    dtype: str
    """Safetensors name, such as `BF16`."""
    shape: tuple[int, ...]
    nbytes: int
    source: ArraySource
    """Stays open as long as its owner keeps it so."""
    place: int
    """Where `source` has it."""
    digest: bytes | None = None
    """XXH3-128 of its bytes if known; `blocks` compares it."""

    def blocks(self) -> Iterator[memoryview]:
        """Yield its bytes; each block is valid until the next.

        Raises:
            ResultsCorrupt: they are too few, or do not have the digest; after the last block.
            OSError: they cannot be read.
        """
        digest = xxhash.xxh3_128()
        left = self.nbytes
        for block in self.source.blocks(self.place, self.nbytes):
            yield block
            if self.digest is not None:
                digest.update(block)
            left -= len(block)
        if left or self.digest not in (None, digest.digest()):
            raise ResultsCorrupt(self.source.path, f"{self.name!r} is not what was written", AGAIN)

    def content(self) -> bytearray:
        """Return all of its bytes.

        Raises:
            ResultsCorrupt, OSError: as `blocks`.
        """
        content = bytearray()
        for block in self.blocks():
            content += block
        return content


class StoredItem(NamedTuple):
    """One item in a file."""

    key: str
    error: str | None
    """Why it failed; such an item has no arrays."""
    arrays: tuple[StoredArray, ...]
    """In the order of their names."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Which items a results file holds."""

    first: int
    """The first item's number."""
    keys: list[str]
    """Keys of all items, in the items' order."""
    errors: dict[int, str]
    """Errors of the items that failed, by the item's number."""


class ResultsFile(ArraySource, Protocol):
    """An open results file; a context that closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def items(self) -> list[StoredItem]:
        """Return its items, after a strict check of everything but the arrays' bytes.

        Raises:
            ResultsCorrupt: it is no results file, or not a whole one.
        """
        ...

    def read(self, place: int, nbytes: int) -> bytearray:
        """Return an array's bytes.

        Args:
            place: as in its `StoredArray`.
            nbytes: its size.

        Raises:
            ResultsCorrupt: the file ends too early.
            OSError: they cannot be read.
        """
        ...


class ResultsFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of results files. The same items and facts must give the same bytes."""

    name: str
    """What users call it, and the extra of shmload that installs its library."""
    version: str
    """What `results.json` calls the layout; changes whenever anything written to a folder does."""
    suffix: str
    """Suffix of its files' names, with the dot."""
    library: str | None = None
    """The package that it needs beside shmload's own dependencies."""
    check_item: Callable[[Head, int], None]
    """Raises `ArgumentError` for an item if a file could not hold that many items like it."""
    write: Callable[[Path, int, Sequence[StoredItem], Mapping[str, str]], None]
    """Writes or replaces the file at a path, with the number of its first item, its items in their
    order and its facts. On return it would survive a loss of power.

    Arrays may be in the file that it replaces. Raises `ResultsCorrupt` for an array that is not
    what was written, `OSError` if the file cannot be written; then nothing has changed.
    """
    read_contents: Callable[[Path], Contents]
    """Returns which items a file holds, fast: the arrays' bytes are not read. Raises
    `ResultsCorrupt`, `OSError`."""
    open: Callable[[Path], ResultsFile]
    """Opens a file. Raises `OSError`, `ResultsCorrupt`."""

    def require_library(self) -> None:
        """Raise ArgumentError if its library is not installed; import nothing."""
        if self.library and importlib.util.find_spec(self.library) is None:
            raise _missing(self.library, self.name)


def import_library(module: str, name: str) -> ModuleType:
    """Import a module of a format's library.

    Args:
        module: its name.
        name: of the format.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != module.partition(".")[0]:  # installed, and broken
            raise
        raise _missing(module.partition(".")[0], name) from exc


def _missing(library: str, name: str) -> ArgumentError:
    return ArgumentError(
        f"results in the format {name!r} need {library}, which is not installed: "
        f"pip install 'shmload[{name}]'"
    )
