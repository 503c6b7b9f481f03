"""Where a shard's tensors go in its segment, as pure functions on headers.

A segment is a safetensors file whose data starts on a page. Tensors whose size is a multiple of 64
bytes stand first, so that all but a few tiny ones lie on a cache line, and every tensor lies on a
multiple of its element size.
"""

from collections.abc import Callable

import msgspec

from shmload._checkpoints.dtypes import FLOATS, NBITS
from shmload._checkpoints.formats.safetensors import build_header
from shmload._checkpoints.header import Header, TensorSpec
from shmload._host.linux import PAGE_NBYTES
from shmload._segments.metadata import UNFINISHED, find_digest
from shmload._segments.pieces import Run, cut_pieces, join_runs

_LINE_NBYTES = 64

DtypeOf = Callable[[TensorSpec], str]
"""Says which dtype a tensor shall have in the segment; its own for "leave it raw"."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a segment's contents but the bytes themselves."""

    header: bytes
    """As it stands at the front of the segment, with a digest of zeros."""
    digest_offset: int
    """Where the 32 hexadecimal digits of the digest stand in the segment, in bytes."""
    pieces: tuple[tuple[Run, ...], ...]
    """Each piece's runs, by target offset; together they cover the data exactly."""
    data_nbytes: int
    """Size of the tensors in the segment, in bytes."""
    read_nbytes: int
    """Size of the tensors in the shard, in bytes."""

    @property
    def nbytes(self) -> int:
        """Size of the whole segment, in bytes."""
        return len(self.header) + self.data_nbytes


def needs_conversion(header: Header, dtype_of: DtypeOf) -> bool:
    """Tell whether any tensor would be stored in another dtype than it has."""
    return any(dtype_of(tensor) != tensor.dtype for tensor in header.tensors)


def lay_out(
    header: Header,
    dtype_of: DtypeOf,
    metadata: dict[str, str],
    piece_nbytes: int | None = None,
) -> Layout:
    """Plan a segment.

    Args:
        header: of the shard.
        dtype_of: the dtype of each tensor in the segment. Only floats are ever converted.
        metadata: what the segment's header says beside the shard's own metadata.
        piece_nbytes: size of its pieces, in bytes; `PIECE_NBYTES` if None, as in a digest.
    """
    moves = [(tensor, _stored_nbytes(tensor, dtype_of)) for tensor in header.tensors]
    # Within an alignment by offset in the shard, so that reading it stays sequential. Its header
    # need not be in that order.
    moves.sort(key=lambda move: (-alignment(move[1][1]), move[0].begin, move[0].end))
    specs: list[TensorSpec] = []
    position = 0
    for tensor, (dtype, nbytes) in moves:
        specs.append(TensorSpec(tensor.name, dtype, tensor.shape, position, position + nbytes))
        position += nbytes
    # transformers 4.57 wants to be told the framework, but only of files that have metadata.
    own = header.metadata if header.metadata is not None else {"format": "pt"}
    raw = build_header(tuple(specs), own | metadata | UNFINISHED, PAGE_NBYTES)
    runs = join_runs([tensor for tensor, _ in moves], specs, header.data_offset, len(raw))
    return Layout(
        header=raw,
        digest_offset=find_digest(raw),
        pieces=tuple(cut_pieces(runs, len(raw), piece_nbytes)),
        data_nbytes=position,
        read_nbytes=header.data_nbytes,
    )


def alignment(nbytes: int) -> int:
    """Return the largest power of two up to a cache line that divides a size.

    Tensors in the falling order of theirs each lie on a multiple of their element size.
    """
    return min(_LINE_NBYTES, nbytes & -nbytes) if nbytes else _LINE_NBYTES


def _stored_nbytes(tensor: TensorSpec, dtype_of: DtypeOf) -> tuple[str, int]:
    dtype = dtype_of(tensor)
    if dtype == tensor.dtype:
        return dtype, tensor.nbytes
    assert tensor.dtype in FLOATS, tensor
    assert dtype in FLOATS, dtype
    return dtype, tensor.nbytes * NBITS[dtype] // NBITS[tensor.dtype]
