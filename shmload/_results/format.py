"""What files say of items, and what shmload must know of a format of results files.

A format is one module that makes a `ResultsFormat`, and its entry in `names.FORMATS`.
"""

import contextlib
import errno
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Protocol, Self

import msgspec

from shmload._checkpoints.dtypes import NBITS
from shmload.errors import ArgumentError, ResultsCorrupt, ResultsInaccessible, ShmloadError

Path = str | os.PathLike[str]

AGAIN = "remove it and run the job again, which computes its items anew"
"""What to do about a damaged file."""

_VERSION = "1"
# Bytes for all items' names, out of the 100 MB that a header of safetensors may have.
_NAMES_NBYTES = 80_000_000
# Header bytes besides the names: per array, and per dimension.
_ENTRY_NBYTES = 100
_SIZE_NBYTES = 20


class Place(msgspec.Struct, frozen=True, gc=False):
    """What an array is, and where it is in its file."""

    dtype: str
    """Safetensors name, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file, or what else the format finds it by."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        nbits = NBITS[self.dtype]
        for size in self.shape:
            nbits *= size
        return nbits // 8


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """An item, as a results file, a journal or a line of the index has it."""

    key: str
    shard: str = ""
    """The name of its results file; said by the index alone, and of items with a result."""
    arrays: dict[str, Place] | None = None
    """In the order of their names; None if it has no result."""
    error: str | None = None
    """Why it failed."""

    @property
    def is_begun(self) -> bool:
        """Whether it has neither result nor error yet."""
        return self.arrays is None and self.error is None


class Source(Protocol):
    """An open file that holds arrays."""

    def read(self, place: Place) -> bytes | bytearray:
        """Return an array's bytes.

        Raises:
            ResultsCorrupt: the file ends too early.
            OSError: they cannot be read.
        """
        ...


Stored = tuple[Item, Source]
"""An item, and the file that holds its arrays."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Which items a results file holds."""

    first: int
    """The first item's number."""
    keys: list[str]
    """Keys of all items, in the items' order."""
    errors: dict[int, str]
    """Errors of the items that failed, by the item's number."""


class ResultsFile(Source, Protocol):
    """An open results file; a context that closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def contents(self) -> Contents:
        """Return which items it holds, fast: the arrays are not looked at.

        Raises:
            ResultsCorrupt, OSError.
        """
        ...

    def items(self) -> list[Item]:
        """Return its items, after a strict check of everything but the arrays' bytes.

        Raises:
            ResultsCorrupt: it is no results file, or not a whole one.
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
    check_item: Callable[[int, Item], None] | None = None
    """Raises `ArgumentError` if a file cannot hold an item of this number, whatever its names."""
    write: Callable[[Path, int, Sequence[Stored], Mapping[str, str]], None]
    """Writes or replaces the file at a path, with the number of its first item, its items in their
    order and its facts. On return it would survive a loss of power.

    Arrays may be in the file that it replaces. Raises `ResultsCorrupt` for an array that is not
    what was written, `OSError` if the file cannot be written; then nothing has changed.
    """
    open: Callable[[Path], ResultsFile]
    """Opens a file. Raises `OSError`, `ResultsCorrupt`."""

    def contents(self, path: Path) -> Contents:
        """Return which items a file holds.

        Raises:
            ResultsCorrupt, OSError.
        """
        with self.open(path) as file:
            return file.contents()

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


@contextlib.contextmanager
def accessing(path: Path) -> Iterator[None]:
    """Raise what the kernel says of a file, or of one beneath it, as `ResultsInaccessible`."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, ShmloadError):
            raise
        where = exc.filename if isinstance(exc.filename, str) else path
        number = exc.errno or errno.EIO
        raise ResultsInaccessible(where, exc.strerror or str(exc), number) from exc


def read_at(fd: int, path: Path, offset: int, nbytes: int) -> bytearray:
    """Return a range of an open file.

    Raises:
        ResultsCorrupt: the file ends before it does.
        OSError: it cannot be read.
    """
    if offset + nbytes > os.fstat(fd).st_size:
        raise ResultsCorrupt(path, "it ends too early", AGAIN)
    content = bytearray(nbytes)
    view = memoryview(content)
    while view:
        got = os.preadv(fd, [view], offset)
        if got == 0:  # it was cut meanwhile
            raise ResultsCorrupt(path, "it ends too early", AGAIN)
        view, offset = view[got:], offset + got
    return content


# How a file describes itself ----------------------------------------------------------------------


def describe(first: int, items: Sequence[Item], facts: Mapping[str, str]) -> dict[str, str]:
    """Return what a results file says of itself, in every format: texts by name.

    Args:
        first: the number of its first item.
        items: all of them, in their order.
        facts: what the results depend on.
    """
    texts = {
        "shmload.results": _VERSION,
        "shmload.first": str(first),
        "shmload.keys": _as_json([item.key for item in items]),
        "shmload.facts": _as_json(dict(sorted(facts.items()))),
    }
    errors = {first + place: item.error for place, item in enumerate(items) if item.error}
    if errors:
        texts["shmload.errors"] = _as_json(errors)
    return texts


def read_description(texts: Mapping[str, str]) -> Contents:
    """Return which items a file with this description holds.

    Raises:
        KeyError, ValueError: it is no description.
    """
    return Contents(
        first=int(texts["shmload.first"]),
        keys=msgspec.json.decode(texts["shmload.keys"], type=list[str]),
        errors=msgspec.json.decode(texts.get("shmload.errors", "{}"), type=dict[int, str]),
    )


def check_names(index: int, item: Item, file_items: int) -> None:
    """Check that the names of an item fit into the header of its file.

    Args:
        index: the item's number.
        item: with its key, and the names of its arrays.
        file_items: how many items the file has.

    Raises:
        ArgumentError: they are too long, or not text that UTF-8 can encode.
    """
    try:
        # The list of keys is JSON within JSON.
        nbytes = len(msgspec.json.encode(_as_json(item.key)))
        for name, place in (item.arrays or {}).items():
            nbytes += len(msgspec.json.encode(f"{item.key}/{name}"))
            nbytes += _ENTRY_NBYTES + _SIZE_NBYTES * len(place.shape)
    except UnicodeEncodeError as exc:
        raise ArgumentError(
            f"the key of item {index}, {item.key!r}, or the name of an array is not text that "
            "UTF-8 can encode; give it another one"
        ) from exc
    if nbytes > _NAMES_NBYTES // file_items:
        raise ArgumentError(
            f"the names in item {index} take {nbytes} bytes, too many for a file of "
            f"{file_items} items; give shorter ones, or fewer shard_items"
        )


def _as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
