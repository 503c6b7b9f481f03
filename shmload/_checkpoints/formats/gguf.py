"""Reads the headers of GGUF files.

Guarantee: a header is accepted only if each tensor lies inside the file, on a multiple of the
file's alignment, has as many bytes as its kind and shape say, and shares none with another.
Reading takes time and memory linear in the header's length, and reads no tensor's bytes.

The format is that of github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3: magic, version and
counts; keys with values; names, shapes, kinds and offsets of the tensors; the tensors' bytes.
"""

import itertools
import math
import os
import struct
from collections.abc import Callable
from typing import Any

from shmload._checkpoints.dtypes import BLOCKS, GGML_TYPES, NBITS
from shmload._checkpoints.header import (
    MAX_HEADER_NBYTES,
    Blocks,
    Format,
    Header,
    TensorSpec,
    reading,
)
from shmload.errors import ShardMalformed, ShardTruncated
from shmload.errors.sources import needing

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIRST_READ_NBYTES = 1 << 20
# A file of a large language model has 50 keys, and lists of 500,000 tokens.
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_TEXTS = 1 << 22
# ggml itself knows four (GGML_MAX_DIMS). Converters of video models write convolutions with five.
_MAX_RANK = 5
_MAX_SIZE = 1 << 63
_ALIGNMENT_KEY = b"general.alignment"
_DEFAULT_ALIGNMENT = 32
_CONVERT_ENDIAN = "convert it with `gguf-convert-endian` of the gguf package"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_COUNTS = struct.Struct("<4sIQQ")
_ARRAY = struct.Struct("<IQ")
_KIND_AND_OFFSET = struct.Struct("<IQ")
# Of the smallest tensor and of the smallest key with a value, in bytes.
_LEAST_TENSOR_NBYTES = 24
_LEAST_PAIR_NBYTES = 13

# GGUFValueType: of fixed size, by number.
_VALUE_NBYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST, _UINT32 = 8, 9, 4


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open file.

    Args:
        fd: an open descriptor; its position is not moved.
        path: what errors call the file.

    Raises:
        ShardMalformed: the header breaks the format, or is of another version.
        ShardTruncated: the file is shorter than its header says.
        ShardUnreadable: the kernel reports an error.
    """
    with reading(path):
        return _read(_Cursor(fd, path))


class _Cursor:
    """Reads a file from its front, no further than it has to."""

    def __init__(self, fd: int, path: str | os.PathLike[str]) -> None:
        self._fd = fd
        self.path = path
        self.file_nbytes = os.fstat(fd).st_size
        self.position = 0
        self._read = b""

    def malformed(self, reason: str, remedy: str = "") -> ShardMalformed:
        """Return the error for a header that breaks the format."""
        return ShardMalformed(self.path, reason, "GGUF", remedy or "download it again")

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        self._require(nbytes)
        begin = self.position
        self.position += nbytes
        return self._read[begin : self.position]

    def unpack(self, what: struct.Struct) -> tuple[Any, ...]:
        """Return the next numbers."""
        self._require(what.size)
        found = what.unpack_from(self._read, self.position)
        self.position += what.size
        return found

    def text(self) -> bytes:
        """Return the next text, after its length."""
        return self.take(self.unpack(_U64)[0])

    def _require(self, nbytes: int) -> None:
        """Read on until so many bytes are there.

        Raises:
            ShardTruncated, ShardMalformed: there are fewer, or the header is too long.
        """
        end = self.position + nbytes
        if end <= len(self._read):
            return
        if end > MAX_HEADER_NBYTES:
            raise self.malformed(f"its header has more than {MAX_HEADER_NBYTES:,} bytes")
        if end > self.file_nbytes:
            raise ShardTruncated(self.path, end, self.file_nbytes)
        wanted = min(self.file_nbytes, max(end, _FIRST_READ_NBYTES, 2 * len(self._read)))
        self._read += os.pread(self._fd, wanted - len(self._read), len(self._read))
        if end > len(self._read):  # it was cut short meanwhile
            raise ShardTruncated(self.path, end, len(self._read))


def _read(cursor: _Cursor) -> Header:
    magic, version, tensors, pairs = cursor.unpack(_COUNTS)
    if magic != _MAGIC:
        raise cursor.malformed("it does not begin with GGUF")
    if version not in _VERSIONS:
        if version and version & 0xFFFF == 0:
            raise cursor.malformed("its numbers are big-endian", _CONVERT_ENDIAN)
        raise cursor.malformed(
            f"its version is {version}, and shmload reads versions 2 and 3",
            "convert the model again with a recent llama.cpp, or download a newer file",
        )
    room = min(cursor.file_nbytes, MAX_HEADER_NBYTES)
    most_tensors = min(room // _LEAST_TENSOR_NBYTES, _MAX_TENSORS)
    most_pairs = min(room // _LEAST_PAIR_NBYTES, _MAX_PAIRS)
    if tensors > most_tensors or pairs > most_pairs:
        raise cursor.malformed(
            f"it claims {tensors} tensors and {pairs} keys; "
            f"{most_tensors} and {most_pairs} are the most for its size"
        )
    alignment = _read_alignment(cursor, pairs)
    found = [_read_tensor(cursor) for _ in range(tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    _check_tensors(cursor, found, alignment, data_offset)
    return Header(tensors=tuple(found), metadata=None, data_offset=data_offset)


def _read_alignment(cursor: _Cursor, pairs: int) -> int:
    """Read over the keys and their values, and return the one that matters here."""
    alignment = _DEFAULT_ALIGNMENT
    keys = set()
    for _ in range(pairs):
        key = cursor.text()
        if key in keys:
            raise cursor.malformed(f"it has the key {_shown(key)} twice")
        keys.add(key)
        (value_type,) = cursor.unpack(_U32)
        if key == _ALIGNMENT_KEY:
            if value_type != _UINT32:
                raise cursor.malformed("its general.alignment is no 32-bit number")
            (alignment,) = cursor.unpack(_U32)
            if alignment.bit_count() != 1:
                raise cursor.malformed(f"its general.alignment is {alignment}, no power of two")
        else:
            _skip(cursor, key, value_type)
    return alignment


def _skip(cursor: _Cursor, key: bytes, value_type: int) -> None:
    count = 1
    if value_type == _LIST:
        value_type, count = cursor.unpack(_ARRAY)
    if value_type in _VALUE_NBYTES:
        cursor.take(count * _VALUE_NBYTES[value_type])
    elif value_type == _TEXT and count <= _MAX_TEXTS:
        for _ in range(count):
            cursor.text()
    elif value_type == _TEXT:
        raise cursor.malformed(
            f"its key {_shown(key)} has {count} texts; {_MAX_TEXTS} are the most"
        )
    else:
        raise cursor.malformed(f"the value of its key {_shown(key)} has the type {value_type}")


def _read_tensor(cursor: _Cursor) -> TensorSpec:
    raw = cursor.text()
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise cursor.malformed(f"the name of its tensor {_shown(raw)} is no UTF-8") from None
    if name == "__metadata__":  # in a segment's header that name means something else
        raise cursor.malformed("it has a tensor named __metadata__")
    (rank,) = cursor.unpack(_U32)
    if rank > _MAX_RANK:
        raise cursor.malformed(f"tensor {name!r} has {rank} dimensions; {_MAX_RANK} are the most")
    # The last dimension comes first.
    shape = cursor.unpack(struct.Struct(f"<{rank}Q"))[::-1]
    number, begin = cursor.unpack(_KIND_AND_OFFSET)
    kind = GGML_TYPES.get(number)
    if kind is None:
        raise cursor.malformed(
            f"tensor {name!r} has the unknown kind {number}",
            "update shmload, or download the model in another kind",
        )
    nbytes = _nbytes(kind, shape)
    if nbytes is None:
        raise cursor.malformed(
            f"tensor {name!r} of shape {shape} is not one of whole {kind} blocks"
        )
    return TensorSpec(name, kind, shape, begin, begin + nbytes)


def _nbytes(kind: str, shape: tuple[int, ...]) -> int | None:
    """Return the size of a tensor in bytes; None if no tensor of that kind has the shape."""
    count = math.prod(shape)
    if any(size >= _MAX_SIZE for size in shape):
        return None
    if kind not in BLOCKS:
        return count * NBITS[kind] // 8
    elements, nbytes = BLOCKS[kind]
    if not shape or shape[-1] % elements:
        return None
    return count // elements * nbytes


def _check_tensors(
    cursor: _Cursor, tensors: list[TensorSpec], alignment: int, data_offset: int
) -> None:
    """Check that tensors have names of their own, are aligned, and do not overlap.

    Raises:
        ShardMalformed: they do not.
        ShardTruncated: one lies outside the file.
    """
    if len({tensor.name for tensor in tensors}) != len(tensors):
        names = sorted(tensor.name for tensor in tensors)
        twice = next(one for one, other in itertools.pairwise(names) if one == other)
        raise cursor.malformed(f"it has the tensor {twice!r} twice")
    end = 0
    for tensor in sorted(tensors, key=lambda each: (each.begin, each.end)):
        if tensor.begin % alignment:
            raise cursor.malformed(
                f"tensor {tensor.name!r} begins at {tensor.begin}, no multiple of {alignment}"
            )
        if tensor.begin < end and tensor.nbytes:
            raise cursor.malformed(f"tensor {tensor.name!r} overlaps the one before it")
        end = max(end, tensor.end)
    if data_offset + end > cursor.file_nbytes and tensors:
        raise ShardTruncated(cursor.path, data_offset + end, cursor.file_nbytes)


def _dequantiser(kind: str, path: str | os.PathLike[str]) -> Callable[[Any], Any]:
    """Return what makes float32 of a row of blocks; imports the gguf package, which takes 0.1 s.

    Args:
        kind: ggml's name of the kind.
        path: of the file, for errors.

    Raises:
        LibraryMissing: the package is not installed.
        NotImplementedError: it does not dequantise the kind.
    """
    with needing("gguf", f"dequantising {path}", "gguf"):
        import gguf
    import numpy as np

    try:
        number = gguf.GGMLQuantizationType[kind]
        gguf.dequantize(np.zeros((1, BLOCKS[kind][1]), np.uint8), number)
    except KeyError as exc:  # an older package does not even have its name
        raise NotImplementedError from exc
    return lambda blocks: gguf.dequantize(blocks, number)


def _parameter(spec: TensorSpec, blocks: Any, path: str | os.PathLike[str]) -> Any:
    """Return what diffusers' `load_gguf_checkpoint` makes of a tensor.

    Raises:
        LibraryMissing: diffusers needs the gguf package for it.
        ValueError: as there, of a kind that it does not know.
    """
    with needing("gguf", f"a quantised model of {path}", "gguf"):
        import gguf
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter

    kind = gguf.GGMLQuantizationType[spec.dtype]
    if kind not in SUPPORTED_GGUF_QUANT_TYPES:
        names = ", ".join(each.name for each in SUPPORTED_GGUF_QUANT_TYPES)
        raise ValueError(
            f"{spec.name} has a quantization type: {kind.name}, which diffusers does not support; "
            f"it supports {names}. Give a dtype and no quantization_config to load it as floats"
        )
    return GGUFParameter(blocks, quant_type=kind)


def _shown(raw: bytes) -> str:
    return repr(raw[:100].decode("utf-8", "backslashreplace"))


GGUF = Format(
    name="GGUF",
    suffixes=(".gguf",),
    base_names={},  # a library is told the name
    argument="gguf_file",
    can_be_linked=False,
    blocks=Blocks(
        kinds=BLOCKS.keys(),
        config="GGUFQuantizationConfig",
        dequantiser=_dequantiser,
        parameter=_parameter,
    ),
    recognises=lambda head: head.startswith(_MAGIC),
    read_header=read_header,
)
