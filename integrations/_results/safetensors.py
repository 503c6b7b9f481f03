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
from shmload._host.files import plain_only, replacing
from shmload._segments.layout import alignment
from shmload.errors import CheckpointError, ResultsCorrupt
from shmload.integrations._results.description import check_names, describe, read_description
from shmload.integrations._results.errors import AGAIN
from shmload.integrations._results.format import (
    Contents,
    Path,
    ResultsFormat,
    StoredArray,
    StoredItem,
)
from shmload.integrations._results.journal import read_blocks

# Not the machine's page size: the same results must give the same bytes everywhere.
_DATA_ALIGNMENT = 4096


class _Front(msgspec.Struct):
    """The metadata of a header; msgspec skips the rest, which is fast."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


class _Entry(msgspec.Struct, gc=False):
    """Where a tensor of a header is; the metadata, an entry too, has no place."""

    data_offsets: tuple[int, int] = (0, 0)


class SafetensorsFile:
    """An open results file; owns its descriptor. A place is the offset of an array's first byte.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = plain_only(os.fspath(path), os.O_RDONLY)

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
            contents = read_description(header.metadata or {})
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


def as_safetensors(
    named: Sequence[tuple[str, StoredArray]], metadata: dict[str, str], data_alignment: int
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file; each part is valid until the next.

    Args:
        named: the arrays by the names that they get.
        metadata: of the file.
        data_alignment: the arrays begin at a multiple of it.

    Raises:
        ResultsCorrupt: an array is not what was written.
    """
    # A stable sort: arrays of images, whose sizes are multiples of 64 bytes, keep their order.
    ordered = sorted(named, key=lambda pair: -alignment(pair[1].nbytes))
    specs, position = [], 0
    for name, array in ordered:
        end = position + array.nbytes
        specs.append(TensorSpec(name, array.dtype, array.shape, position, end))
        position = end
    yield build_header(tuple(specs), metadata, data_alignment)
    for _, array in ordered:
        yield from array.blocks()


def _write(path: Path, first: int, items: Sequence[StoredItem], facts: Mapping[str, str]) -> None:
    named = [(f"{item.key}/{array.name}", array) for item in items for array in item.arrays]
    with replacing(path, durable=True) as file:
        file.writelines(as_safetensors(named, describe(first, items, facts), _DATA_ALIGNMENT))


def _read_contents(path: Path) -> Contents:
    with open(path, "rb", opener=plain_only) as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > nbytes:
            raise ResultsCorrupt(path, "it ends within its header", AGAIN)
        raw = file.read(length)
    try:
        contents = read_description(msgspec.json.decode(raw, type=_Front).metadata)
        entries = msgspec.json.decode(raw, type=dict[str, _Entry])
    except (KeyError, ValueError) as exc:
        raise ResultsCorrupt(path, "its header is not that of a shard", AGAIN) from exc
    wanted = 8 + length + max(entry.data_offsets[1] for entry in entries.values())
    if nbytes != wanted:
        raise ResultsCorrupt(path, f"it has {nbytes} bytes instead of {wanted}", AGAIN)
    return contents


SAFETENSORS = ResultsFormat(
    name="safetensors",
    version="1",
    suffix=".safetensors",
    check_item=check_names,
    write=_write,
    read_contents=_read_contents,
    open=SafetensorsFile,
)
