"""Where a shard's tensors lie in its segment, as pure functions on headers.

A segment is a safetensors file whose data starts on a page. Tensors whose size is a multiple of 64
bytes come first, so that all but a few tiny tensors start on a cache line, and every tensor starts
on a multiple of its element size.
"""

from collections.abc import Callable

import msgspec

from shmload._checkpoints.dtypes import (
    BLOCKS,
    FLOATS,
    LARGEST_BLOCK,
    RAW_BLOCKS,
    converted_nbytes,
    shape_in_bytes,
)
from shmload._checkpoints.formats.safetensors import build_header
from shmload._checkpoints.header import Header, TensorSpec
from shmload._host.memory import PAGE_NBYTES
from shmload._segments.metadata import Metadata, header_entries, main_dtype
from shmload._segments.pieces import Run, cut_pieces, join_runs

_LINE_NBYTES = 64

DtypeOf = Callable[[TensorSpec], str]
"""Returns the dtype that a tensor has in the segment; its own dtype means unchanged."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A segment's contents, except the tensors' bytes."""

    header: bytes
    """The bytes at the start of the segment, with a digest of zeros."""
    pieces: tuple[tuple[Run, ...], ...]
    """Each piece's runs, by target offset; together they cover the data exactly."""
    nbytes: int
    """Size of the whole segment, in bytes."""


def needs_conversion(header: Header, dtype_of: DtypeOf) -> bool:
    """Tell whether any tensor has another dtype in the segment than in the shard."""
    return any(dtype_of(tensor) != tensor.dtype for tensor in header.tensors)


def lay_out(
    header: Header,
    dtype_of: DtypeOf,
    metadata: Metadata,
    piece_nbytes: int | None = None,
) -> Layout:
    """Plan a segment.

    Args:
        header: of the shard.
        dtype_of: the dtype of each tensor in the segment. Only floats and blocks are
            ever converted.
        metadata: what its header says, besides the shard's own metadata.
        piece_nbytes: size of its pieces, in bytes; `PIECE_NBYTES` if None, as in a digest.
    """
    tensors = [(tensor, dtype_of(tensor)) for tensor in header.tensors]
    # Within an alignment in the order of the shard's data, so that reading stays sequential. The
    # header need not be in that order.
    tensors.sort(key=lambda each: (-_alignment_of(*each), each[0].begin, each[0].end))
    specs: list[TensorSpec] = []
    position = 0
    for tensor, dtype in tensors:
        specs.append(_stored(tensor, dtype, position))
        position = specs[-1].end
    described = msgspec.structs.replace(
        metadata, dtype=metadata.dtype or main_dtype(header.tensors, metadata.conversion)
    )
    raw = build_header(tuple(specs), header_entries(described, header.metadata), PAGE_NBYTES)
    runs = join_runs([tensor for tensor, _ in tensors], specs, header.data_offset, len(raw))
    return Layout(
        header=raw,
        pieces=tuple(cut_pieces(runs, len(raw), piece_nbytes)),
        nbytes=len(raw) + position,
    )


def alignment(nbytes: int, most: int = _LINE_NBYTES) -> int:
    """Return the largest power of two, up to a cache line or `most`, that divides a size.

    Tensors sorted by falling alignment each start on a multiple of their element size.
    """
    return min(most, nbytes & -nbytes) if nbytes else most


def _stored(tensor: TensorSpec, dtype: str, begin: int) -> TensorSpec:
    """Return a tensor as the segment has it.

    Args:
        tensor: of the shard.
        dtype: that it gets.
        begin: its offset in the segment's data, in bytes.
    """
    shape, nbytes = tensor.shape, tensor.nbytes
    if dtype != tensor.dtype:
        assert tensor.dtype in FLOATS or tensor.dtype in BLOCKS, tensor
        assert dtype in FLOATS, dtype
        nbytes = converted_nbytes(nbytes, tensor.dtype, dtype)
    elif dtype in BLOCKS:
        dtype, shape = RAW_BLOCKS, shape_in_bytes(dtype, shape)
    return TensorSpec(tensor.name, dtype, shape, begin, begin + nbytes)


def _alignment_of(tensor: TensorSpec, dtype: str) -> int:
    """Return what a tensor of the shard, which gets a dtype, is aligned to in the segment."""
    most = _LINE_NBYTES
    if tensor.dtype in BLOCKS:
        # Parts of a tensor that are whole pages can be mapped in another order. A block must not
        # lie in two pieces, so what is made of one starts on a multiple of the largest.
        most = PAGE_NBYTES if dtype == tensor.dtype else LARGEST_BLOCK * 8
    return alignment(converted_nbytes(tensor.nbytes, tensor.dtype, dtype), most)
