"""Pieces, the units in which a segment is filled and digested, and the runs they consist of.

A segment's digest is XXH3-128 of the XXH3-128 of each piece of its data. The process that fills a
piece digests it, so no byte is read twice and pieces can be filled in any order. The digest finds
damage, not forgery: a process that can write to this user's memory can also write a digest.

A worker process imports this module, so it imports only what is light.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import xxhash

from shmload._checkpoints.dtypes import RAW_BLOCKS, unit_nbytes

if TYPE_CHECKING:
    from shmload._checkpoints.header import TensorSpec

PIECE_NBYTES = 64 << 20
"""Size of a piece, in bytes of the segment; the last piece of a segment may be smaller."""


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive elements of one dtype, or blocks, that become elements of another."""

    source_offset: int
    """From the start of the shard's file, in bytes."""
    target_offset: int
    """From the start of the segment, in bytes."""
    count: int
    """Elements; blocks, if the source is quantised."""
    source: str
    """Dtype in the shard; `U8` in both means bytes that stay as they are."""
    target: str
    """Safetensors dtype in the segment."""

    @property
    def source_nbytes(self) -> int:
        """Size in the shard, in bytes."""
        return self.count * unit_nbytes(self.source, self.target)[0]

    @property
    def source_end(self) -> int:
        """Where it ends in the shard's file, in bytes."""
        return self.source_offset + self.source_nbytes

    @property
    def target_nbytes(self) -> int:
        """Size in the segment, in bytes."""
        return self.count * unit_nbytes(self.source, self.target)[1]


def join_runs(
    tensors: "list[TensorSpec]", specs: "list[TensorSpec]", source_base: int, target_base: int
) -> list[Run]:
    """Join tensors that are neighbours in the shard and in the segment into runs.

    30,000 small tensors become a handful of runs.

    Args:
        tensors: as they lie in the shard.
        specs: the same tensors, in the same order, as they lie in the segment.
        source_base: where the shard's data starts, in bytes.
        target_base: where the segment's data starts, in bytes.
    """
    runs: list[Run] = []
    start: TensorSpec | None = None
    end: TensorSpec | None = None
    first_target = 0
    kind: tuple[str, str] = ("", "")

    def close() -> None:
        if start is not None and end is not None and end.end > start.begin:
            count = (end.end - start.begin) // unit_nbytes(*kind)[0]
            runs.append(Run(source_base + start.begin, target_base + first_target, count, *kind))

    for tensor, spec in zip(tensors, specs, strict=True):
        stays = spec.dtype in (tensor.dtype, RAW_BLOCKS)
        this = ("U8", "U8") if stays else (tensor.dtype, spec.dtype)
        if end is None or this != kind or tensor.begin != end.end:
            close()
            start, first_target, kind = tensor, spec.begin, this
        end = tensor
    close()
    return runs


def cut_pieces(
    runs: list[Run], target_base: int, piece_nbytes: int | None = None
) -> Iterator[tuple[Run, ...]]:
    """Cut runs at every `piece_nbytes` of the segment's data; yield the runs of each piece.

    Args:
        runs: in the order of their target offsets.
        target_base: where the segment's data starts, in bytes.
        piece_nbytes: size of a piece, in bytes; `PIECE_NBYTES` if None. A block must not lie across
            the end of one, so it is a multiple of the largest (2 KiB).
    """
    piece_nbytes = piece_nbytes or PIECE_NBYTES
    piece: list[Run] = []
    limit = target_base + piece_nbytes
    for run in runs:
        source_nbytes, target_nbytes = unit_nbytes(run.source, run.target)
        source, target, left = run.source_offset, run.target_offset, run.count
        while left:
            count = min(left, (limit - target) // target_nbytes)
            if count == 0:
                yield tuple(piece)
                piece = []
                limit += piece_nbytes
                continue
            piece.append(Run(source, target, count, run.source, run.target))
            source += count * source_nbytes
            target += count * target_nbytes
            left -= count
    if piece:
        yield tuple(piece)


def range_of(runs: Sequence[Run]) -> tuple[int, int]:
    """Return where a piece begins in the segment, and where it ends, in bytes."""
    last = runs[-1]
    return runs[0].target_offset, last.target_offset + last.target_nbytes


def piece_ranges(data_offset: int, data_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and the size of each piece of a segment, in bytes."""
    for begin in range(0, data_nbytes, PIECE_NBYTES):
        yield data_offset + begin, min(PIECE_NBYTES, data_nbytes - begin)


def combine_digests(pieces: Iterable[bytes]) -> str:
    """Combine the digests of a segment's pieces into the segment's, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(b"".join(pieces))
