"""Finished shards of results: safetensors files that say which items they hold.

A tensor is called `<key of the item>/<name of the array>`; since a name has no slash, the last one
parts them. The metadata holds the keys of all items in their order, with the errors of those that
failed. What the items are decides every byte of the file, whenever and in which order they came.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from shmload._checkpoints.formats.safetensors import build_header, read_header
from shmload._checkpoints.header import TensorSpec
from shmload._host.files import replacing
from shmload._segments.layout import alignment
from shmload.errors import CheckpointError, ResultsCorrupt, ResultsInaccessible, ShmloadError
from shmload.integrations._results.facts import VERSION
from shmload.integrations._results.journal import read_blocks

# Not the machine's page: the same results give the same bytes everywhere.
_DATA_ALIGNMENT = 4096
AGAIN = "remove it and run the job again, which computes its items anew"
"""What to do about a damaged file."""

_Path = str | os.PathLike[str]


class Piece(NamedTuple):
    """One array of an item, in a file."""

    name: str
    dtype: str
    """Safetensors name."""
    shape: tuple[int, ...]
    nbytes: int
    path: _Path
    fd: int
    """Of that file, open; stays with whoever opened it."""
    offset: int
    """Of the first byte in the file."""
    digest: bytes | None = None
    """XXH3-128 of its bytes where that is known, which is compared when they are copied."""


class Item(NamedTuple):
    """One item of a shard."""

    key: str
    error: str | None
    pieces: tuple[Piece, ...]
    """By name."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Which items a shard holds."""

    first: int
    """The first item's number."""
    keys: list[str]
    """Of all items, in their order."""
    errors: dict[int, str]
    """Of the items that failed, by number."""


class _Front(msgspec.Struct):
    """The metadata of a header; the rest is skipped, at the speed of a search."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


@contextlib.contextmanager
def accessing(path: _Path) -> Iterator[None]:
    """Turn what the kernel says of a file, or of one beneath it, into an error of ours."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, ShmloadError):
            raise
        where = exc.filename if isinstance(exc.filename, str) else path
        number = exc.errno or errno.EIO
        raise ResultsInaccessible(where, exc.strerror or str(exc), number) from exc


def write_shard(path: _Path, first: int, items: Sequence[Item], facts: Mapping[str, str]) -> None:
    """Write a shard, or write it anew; on return it would survive a loss of power.

    Args:
        path: of the shard. Pieces may lie in what is there now.
        first: number of the first item.
        items: all of them, in their order.
        facts: what the results depend on.

    Raises:
        ResultsCorrupt: a piece does not have its digest.
        OSError: the shard cannot be written, or a piece not be read.
    """
    named = [(f"{item.key}/{piece.name}", piece) for item in items for piece in item.pieces]
    # Stable, so the order stays where sizes are those of images: multiples of 64 bytes.
    named.sort(key=lambda pair: -alignment(pair[1].nbytes))
    specs, position = [], 0
    for name, piece in named:
        end = position + piece.nbytes
        specs.append(TensorSpec(name, piece.dtype, piece.shape, position, end))
        position = end
    errors = {first + place: item.error for place, item in enumerate(items) if item.error}
    metadata = {
        "shmload.results": VERSION,
        "shmload.first": str(first),
        "shmload.keys": _as_json([item.key for item in items]),
        "shmload.facts": _as_json(dict(sorted(facts.items()))),
    }
    if errors:
        metadata["shmload.errors"] = _as_json(errors)
    with replacing(path, durable=True) as file:
        file.write(build_header(tuple(specs), metadata, _DATA_ALIGNMENT))
        for _, piece in named:
            _copy(piece, file)


def read_contents(path: _Path) -> Contents:
    """Return which items a shard holds; of its data nothing is read.

    Raises:
        ResultsCorrupt: it is no shard of results.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ResultsCorrupt(path, "it ends within its header", AGAIN)
        raw = file.read(length)
    try:
        return _contents(msgspec.json.decode(raw, type=_Front).metadata)
    except (KeyError, ValueError) as exc:
        raise ResultsCorrupt(path, "its header is not that of a shard of results", AGAIN) from exc


def read_items(fd: int, path: _Path) -> list[Item]:
    """Return the items of a shard, and where each array is, after a strict look at its header.

    Raises:
        ResultsCorrupt: it is no shard of results, or not a whole one.
    """
    try:
        header = read_header(fd, path)
        contents = _contents(header.metadata or {})
    except (CheckpointError, KeyError, ValueError) as exc:
        raise ResultsCorrupt(path, str(exc), AGAIN) from exc
    pieces: dict[str, list[Piece]] = {key: [] for key in contents.keys}
    for spec in header.tensors:
        key, _, name = spec.name.rpartition("/")
        if key not in pieces:
            raise ResultsCorrupt(path, f"tensor {spec.name!r} belongs to no item", AGAIN)
        offset = header.data_offset + spec.begin
        piece = Piece(name, spec.dtype, spec.shape, spec.nbytes, path, fd, offset)
        pieces[key].append(piece)
    return [
        Item(key, contents.errors.get(number), tuple(sorted(pieces[key])))
        for number, key in enumerate(contents.keys, contents.first)
    ]


def _as_json(value: object) -> str:
    """Write a value as JSON text."""
    return msgspec.json.encode(value).decode()


def _contents(metadata: Mapping[str, str]) -> Contents:
    return Contents(
        first=int(metadata["shmload.first"]),
        keys=msgspec.json.decode(metadata["shmload.keys"], type=list[str]),
        errors=msgspec.json.decode(metadata.get("shmload.errors", "{}"), type=dict[int, str]),
    )


def _copy(piece: Piece, file: BinaryIO) -> None:
    digest = xxhash.xxh3_128()
    left = piece.nbytes
    for block in read_blocks(piece.fd, piece.offset, piece.nbytes):
        file.write(block)
        if piece.digest is not None:
            digest.update(block)
        left -= len(block)
    if left or piece.digest not in (None, digest.digest()):
        raise ResultsCorrupt(piece.path, f"{piece.name!r} is not what was written", AGAIN)
