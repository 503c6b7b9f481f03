"""Results files in the safetensors format.

A tensor is called `<key of the item>/<name of the array>`; a name has no slash, so the last one
separates them. The metadata holds the keys of all items in their order, with the errors of those
that failed. The items and the facts decide every byte of the file.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import msgspec

from shmload._checkpoints.formats.safetensors import build_header, read_header
from shmload._checkpoints.header import TensorSpec
from shmload._host.files import replacing
from shmload._segments.layout import alignment
from shmload.errors import ArgumentError, CheckpointError, ResultsCorrupt
from shmload.integrations._results.errors import AGAIN
from shmload.integrations._results.format import (
    Contents,
    ResultsFormat,
    StoredArray,
    StoredItem,
)
from shmload.integrations._results.journal import Head, read_blocks

# Not the machine's page size: the same results must give the same bytes everywhere.
_DATA_ALIGNMENT = 4096
# Bytes for all items' names, out of the 100 MB that a header may have.
_NAMES_NBYTES = 80_000_000
# Header bytes besides the names: per array, and per dimension.
_ENTRY_NBYTES = 100
_SIZE_NBYTES = 20

_VERSION = "1"
_Path = str | os.PathLike[str]


class _Front(msgspec.Struct):
    """The metadata of a header; msgspec skips the rest, which is fast."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


class SafetensorsFile:
    """An open results file; owns its descriptor. A place is the offset of an array's first byte.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: _Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def items(self) -> list[StoredItem]:
        """See `ResultsFile`."""
        try:
            header = read_header(self._fd, self.path)
            contents = _contents(header.metadata or {})
        except (CheckpointError, KeyError, ValueError) as exc:
            raise ResultsCorrupt(self.path, str(exc), AGAIN) from exc
        arrays: dict[str, list[StoredArray]] = {key: [] for key in contents.keys}
        for spec in header.tensors:
            key, _, name = spec.name.rpartition("/")
            if key not in arrays:
                raise ResultsCorrupt(self.path, f"tensor {spec.name!r} belongs to no item", AGAIN)
            place = header.data_offset + spec.begin
            found = StoredArray(name, spec.dtype, spec.shape, spec.nbytes, self, place)
            arrays[key].append(found)
        return [
            StoredItem(
                key,
                contents.errors.get(number),
                tuple(sorted(arrays[key], key=lambda array: array.name)),
            )
            for number, key in enumerate(contents.keys, contents.first)
        ]

    def blocks(self, place: int, nbytes: int) -> Iterator[memoryview]:
        """See `ArraySource`."""
        return read_blocks(self._fd, place, nbytes)

    def read(self, place: int, nbytes: int) -> bytearray:
        """See `ResultsFile`."""
        content = bytearray(nbytes)
        view = memoryview(content)
        while view:
            got = os.preadv(self._fd, [view], place)
            if got == 0:
                raise ResultsCorrupt(
                    self.path, "it ends too early", "remove it and run the job again"
                )
            view, place = view[got:], place + got
        return content


def _write(path: _Path, first: int, items: Sequence[StoredItem], facts: Mapping[str, str]) -> None:
    named = [(f"{item.key}/{array.name}", array) for item in items for array in item.arrays]
    # A stable sort: arrays of images, whose sizes are multiples of 64 bytes, keep their order.
    named.sort(key=lambda pair: -alignment(pair[1].nbytes))
    specs, position = [], 0
    for name, array in named:
        end = position + array.nbytes
        specs.append(TensorSpec(name, array.dtype, array.shape, position, end))
        position = end
    errors = {first + place: item.error for place, item in enumerate(items) if item.error}
    metadata = {
        "shmload.results": _VERSION,
        "shmload.first": str(first),
        "shmload.keys": _as_json([item.key for item in items]),
        "shmload.facts": _as_json(dict(sorted(facts.items()))),
    }
    if errors:
        metadata["shmload.errors"] = _as_json(errors)
    with replacing(path, durable=True) as file:
        file.write(build_header(tuple(specs), metadata, _DATA_ALIGNMENT))
        for _, array in named:
            file.writelines(array.blocks())


def _read_contents(path: _Path) -> Contents:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ResultsCorrupt(path, "it ends within its header", AGAIN)
        raw = file.read(length)
    try:
        return _contents(msgspec.json.decode(raw, type=_Front).metadata)
    except (KeyError, ValueError) as exc:
        raise ResultsCorrupt(path, "its header is not that of a results file", AGAIN) from exc


def _contents(metadata: Mapping[str, str]) -> Contents:
    return Contents(
        first=int(metadata["shmload.first"]),
        keys=msgspec.json.decode(metadata["shmload.keys"], type=list[str]),
        errors=msgspec.json.decode(metadata.get("shmload.errors", "{}"), type=dict[int, str]),
    )


def _check_item(head: Head, file_items: int) -> None:
    """Raise ArgumentError if an item's names are not UTF-8, or exceed its share of the header."""
    try:
        # The list of keys is JSON within JSON.
        nbytes = len(msgspec.json.encode(msgspec.json.encode(head.key).decode()))
        for array in head.arrays:
            nbytes += len(msgspec.json.encode(f"{head.key}/{array.name}"))
            nbytes += _ENTRY_NBYTES + _SIZE_NBYTES * len(array.shape)
    except UnicodeEncodeError as exc:
        raise ArgumentError(
            f"the key of item {head.index}, {head.key!r}, or the name of an array is not text that "
            "UTF-8 can encode; give it another one"
        ) from exc
    if nbytes > _NAMES_NBYTES // file_items:
        raise ArgumentError(
            f"the names in item {head.index} take {nbytes} bytes, too many for a file of "
            f"{file_items} items; give shorter ones, or fewer shard_items"
        )


def _as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


SAFETENSORS = ResultsFormat(
    version=_VERSION,
    suffix=".safetensors",
    check_item=_check_item,
    write=_write,
    read_contents=_read_contents,
    open=SafetensorsFile,
)
