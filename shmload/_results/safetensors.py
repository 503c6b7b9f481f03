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
from shmload._results.format import (
    AGAIN,
    Contents,
    Item,
    Path,
    Place,
    ResultsFormat,
    Source,
    Stored,
    describe,
    read_at,
    read_description,
)
from shmload._segments.layout import alignment
from shmload.errors import CheckpointError, ResultsCorrupt

# Not the machine's page size: the same results must give the same bytes everywhere.
_DATA_ALIGNMENT = 4096


class _Front(msgspec.Struct):
    """The metadata of a header; msgspec skips the rest, which is fast."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


class _Entry(msgspec.Struct, gc=False):
    """Where a tensor of a header is; the metadata, an entry too, has no place."""

    data_offsets: tuple[int, int] = (0, 0)


class SafetensorsFile:
    """An open results file; owns its descriptor. `Place.offset` is that of an array's first byte.

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

    def contents(self) -> Contents:
        """See `ResultsFile`."""
        length = int.from_bytes(read_at(self._fd, self.path, 0, 8), "little")
        raw = read_at(self._fd, self.path, 8, length)
        try:
            contents = read_description(msgspec.json.decode(raw, type=_Front).metadata)
            entries = msgspec.json.decode(raw, type=dict[str, _Entry])
        except (KeyError, ValueError) as exc:
            reason = "its header is not that of a shard"
            raise ResultsCorrupt(self.path, reason, AGAIN) from exc
        nbytes = os.fstat(self._fd).st_size
        wanted = 8 + length + max(entry.data_offsets[1] for entry in entries.values())
        if nbytes != wanted:
            raise ResultsCorrupt(self.path, f"it has {nbytes} bytes instead of {wanted}", AGAIN)
        return contents

    def items(self) -> list[Item]:
        """See `ResultsFile`."""
        try:
            header = read_header(self._fd, self.path)
            contents = read_description(header.metadata or {})
        except (CheckpointError, KeyError, ValueError) as exc:
            raise ResultsCorrupt(self.path, str(exc), AGAIN) from exc
        arrays: dict[str, dict[str, Place]] = {key: {} for key in contents.keys}
        for spec in sorted(header.tensors, key=lambda spec: spec.name):
            key, _, name = spec.name.rpartition("/")
            if key not in arrays:
                raise ResultsCorrupt(self.path, f"tensor {spec.name!r} belongs to no item", AGAIN)
            arrays[key][name] = Place(spec.dtype, spec.shape, header.data_offset + spec.begin)
        return [
            Item(key, error=contents.errors[number])
            if number in contents.errors
            else Item(key, arrays=arrays[key])
            for number, key in enumerate(contents.keys, contents.first)
        ]

    def read(self, place: Place) -> bytearray:
        """See `Source`."""
        return read_at(self._fd, self.path, place.offset, place.nbytes)


def as_safetensors(
    named: Sequence[tuple[str, Place, Source]], metadata: dict[str, str], data_alignment: int
) -> Iterator[bytes | bytearray]:
    """Yield the content of a safetensors file in parts.

    Args:
        named: the arrays by the names that they get.
        metadata: of the file.
        data_alignment: the arrays begin at a multiple of it.

    Raises:
        ResultsCorrupt: an array is not what was written.
    """
    # A stable sort: arrays of images, whose sizes are multiples of 64 bytes, keep their order.
    ordered = sorted(named, key=lambda each: -alignment(each[1].nbytes))
    specs, begin = [], 0
    for name, place, _ in ordered:
        end = begin + place.nbytes
        specs.append(TensorSpec(name, place.dtype, place.shape, begin, end))
        begin = end
    yield build_header(tuple(specs), metadata, data_alignment)
    for _, place, source in ordered:
        yield source.read(place)


def _write(path: Path, first: int, stored: Sequence[Stored], facts: Mapping[str, str]) -> None:
    description = describe(first, [item for item, _ in stored], facts)
    named = [
        (f"{item.key}/{name}", place, source)
        for item, source in stored
        for name, place in (item.arrays or {}).items()
    ]
    with replacing(path, durable=True) as file:
        file.writelines(as_safetensors(named, description, _DATA_ALIGNMENT))


SAFETENSORS = ResultsFormat(
    name="safetensors",
    version="1",
    suffix=".safetensors",
    write=_write,
    open=SafetensorsFile,
)
