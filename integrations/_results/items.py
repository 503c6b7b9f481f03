"""The result or the error of one item, checked before any of it is written."""

from collections.abc import Mapping
from typing import NamedTuple

import xxhash

from shmload._checkpoints.dtypes import NBITS
from shmload.errors import ArgumentError
from shmload.integrations._results.format import ResultsFormat
from shmload.integrations._results.journal import ArrayHead, Buffer, Head
from shmload.integrations._results.keys import plain

# The limit of shmload's reader of safetensors files.
_MAX_RANK = 64
_MAX_ERROR_CHARS = 1000


class Array(NamedTuple):
    """One array of a result."""

    dtype: str
    """Safetensors name, such as `BF16`."""
    shape: tuple[int, ...]
    content: Buffer
    """Its bytes, C-contiguous and little-endian, in any object with a buffer."""


class NewItem(NamedTuple):
    """An item as its journal takes it."""

    head: Head
    contents: list[Buffer]


def result(
    index: int, key: str, arrays: Mapping[str, Array], format: ResultsFormat, file_items: int
) -> NewItem:
    """Check an item's result, and put its arrays in the order of their names.

    Args:
        index: the item's number.
        key: its name.
        arrays: by name; not copied.
        format: of the results file.
        file_items: how many items a results file holds.

    Raises:
        ArgumentError: a name, dtype or shape is not valid, or the names are too long.
    """
    heads, contents = [], []
    for name, given in sorted(arrays.items()):
        if not name or "/" in name:
            raise ArgumentError(f"item {index}: the array name {name!r} is empty, or has a slash")
        content = _flat(given, f"item {index}, array {name!r}")
        digest = xxhash.xxh3_128_digest(content)
        heads.append(ArrayHead(plain(name), given.dtype, tuple(given.shape), len(content), digest))
        contents.append(content)
    head = Head(index, plain(key), None, tuple(heads))
    format.check_item(head, file_items)
    return NewItem(head, contents)


def failure(index: int, key: str, error: str, format: ResultsFormat, file_items: int) -> NewItem:
    """Check the key of an item that failed; of a long error only the end is kept.

    Raises:
        ArgumentError: the name is too long, or not text.
    """
    error = error.encode(errors="backslashreplace").decode()[-_MAX_ERROR_CHARS:]
    head = Head(index, plain(key), error or "unknown", ())
    format.check_item(head, file_items)
    return NewItem(head, [])


def note(index: int, key: str) -> Head:
    """Return the record of an item that was begun; the key is text that UTF-8 can encode."""
    return Head(index, plain(key), "it was begun, and has no result", (), is_begun=True)


def _flat(given: Array, what: str) -> Buffer:
    """Return an array's bytes as a flat buffer, after a check of their number."""
    nbits = NBITS.get(given.dtype)
    if nbits is None:
        raise ArgumentError(f"{what}: unknown dtype {given.dtype!r}")
    for size in given.shape:
        nbits *= size
    view = memoryview(given.content)
    is_shape = min(given.shape, default=0) >= 0 and len(given.shape) <= _MAX_RANK
    if not is_shape or nbits != 8 * view.nbytes or not view.c_contiguous:
        raise ArgumentError(
            f"{what}: {given.dtype} of shape {list(given.shape)} does not have the {view.nbytes} "
            "bytes that were given, or they are not in a row"
        )
    return view.cast("B") if view.nbytes else b""
