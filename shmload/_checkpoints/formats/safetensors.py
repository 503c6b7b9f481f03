"""safetensors files: a strict reader of headers, and a writer. Segments have this format too.

Guarantee: `parse_header` accepts a header only if its tensors stand one after the other, by offset,
with no overlap, no hole and no byte left over. Reading takes time and memory linear in the header's
length, whatever it says. The format is the one of github.com/huggingface/safetensors: 8 bytes of
little-endian length, that many bytes of JSON, then the tensors' bytes.
"""

import os
import weakref
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from shmload._checkpoints.dtypes import BLOCKS
from shmload._checkpoints.header import (
    MAX_HEADER_NBYTES,
    Format,
    Header,
    TensorSpec,
    read_head,
    reading,
    refusal,
    truncated,
    wrong_in,
)
from shmload.errors import ShardMalformed, ShardTruncated

_NAME = "safetensors"
_LENGTH_NBYTES = 8
# By their bytes, for as long as somebody else keeps them.
_kept: "weakref.WeakValueDictionary[bytes, Header]" = weakref.WeakValueDictionary()


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open file.

    Args:
        fd: an open descriptor; its position is not moved.
        path: what errors call the file.

    Raises:
        ShardMalformed: the header breaks the format, or it is a git-lfs pointer or a web page.
        ShardTruncated: the file is shorter than its header says.
        ShardUnreadable: the kernel reports an error.
    """
    try:
        with reading(path):
            return _read_header(fd, path)
    except (ShardMalformed, ShardTruncated) as exc:
        raise refusal(read_head(fd, path), path, os.fstat(fd).st_size) or exc from None


def _read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    return read_front(lambda nbytes, begin: os.pread(fd, nbytes, begin), os.fstat(fd).st_size, path)


def read_front(
    read: Callable[[int, int], bytes], file_nbytes: int, path: str | os.PathLike[str]
) -> Header:
    """Read and check the header of a file that is read by a function.

    Args:
        read: returns so many bytes from an offset, or fewer at the end of the file.
        file_nbytes: size of the file.
        path: what errors call it.

    Raises:
        ShardMalformed, ShardTruncated: as `read_header`.
        Exception: of the function.
    """
    start = read(_LENGTH_NBYTES, 0)
    if len(start) < _LENGTH_NBYTES:
        raise truncated(path, _LENGTH_NBYTES, file_nbytes)
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_NBYTES:
        raise _malformed(path, f"its first 8 bytes claim a header of {length} bytes")
    if _LENGTH_NBYTES + length > file_nbytes:
        raise truncated(path, _LENGTH_NBYTES + length, file_nbytes)
    raw = read(length, _LENGTH_NBYTES)
    header = parse_header(raw, path)
    expected = header.data_offset + (header.tensors[-1].end if header.tensors else 0)
    if file_nbytes < expected:
        raise truncated(path, expected, file_nbytes)
    if file_nbytes > expected:
        raise _malformed(path, f"{file_nbytes - expected} bytes follow the last tensor")
    return header


def parse_header(raw: bytes, path: str | os.PathLike[str]) -> Header:
    """Check the JSON part of a header.

    A load meets the header of a segment twice. So one is found again while anybody keeps it.

    Raises:
        ShardMalformed: it breaks the format, or describes overlapping bytes or holes.
    """
    header = _kept.get(raw)
    if header is None:
        _kept[raw] = header = _parse(raw, path)
    return header


def _parse(raw: bytes, path: str | os.PathLike[str]) -> Header:
    if not raw.startswith(b"{"):
        raise _malformed(path, "its header does not start with a JSON object")
    try:
        entries = _OBJECT.decode(raw)
        metadata = _METADATA.decode(entries.pop("__metadata__", b"null"))
        specs = [_spec(name, _ENTRY.decode(entry)) for name, entry in entries.items()]
    except (ValueError, RecursionError) as exc:  # msgspec's errors are ValueErrors
        reason = "nesting too deep" if isinstance(exc, RecursionError) else str(exc)[:200]
        raise _malformed(path, f"its header is wrong ({reason})") from exc
    specs.sort(key=lambda spec: (spec.begin, spec.end))
    position = 0
    for spec in specs:
        if spec.dtype in BLOCKS:
            raise _malformed(path, f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r}")
        if wrong := wrong_in(spec):
            raise _malformed(path, wrong)
        if spec.begin != position:
            kind = "overlaps the one before it" if spec.begin < position else "follows a hole"
            raise _malformed(path, f"tensor {spec.name!r} {kind}")
        position = spec.end
    return Header(tensors=tuple(specs), metadata=metadata, data_offset=_LENGTH_NBYTES + len(raw))


def build_header(
    tensors: tuple[TensorSpec, ...], metadata: dict[str, str], alignment: int
) -> bytes:
    """Write a header, length included, padded with spaces so that the data starts aligned.

    Args:
        tensors: with their final offsets.
        metadata: written as `__metadata__`.
        alignment: the data starts at a multiple of this, in bytes.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.begin, tensor.end),
        }
    raw = msgspec.json.encode(entries)
    raw += b" " * (-(_LENGTH_NBYTES + len(raw)) % alignment)
    return len(raw).to_bytes(_LENGTH_NBYTES, "little") + raw


def _malformed(path: str | os.PathLike[str], reason: str) -> ShardMalformed:
    return ShardMalformed(
        f"{path} is not a valid {_NAME} file: {reason}; download it again", path=path
    )


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The header's entry of one tensor; msgspec checks types and ranges while it decodes."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str] | None)
_ENTRY = msgspec.json.Decoder(_Entry)


def _spec(name: str, entry: _Entry) -> TensorSpec:
    return TensorSpec(name, entry.dtype, entry.shape, *entry.data_offsets)


def _recognises(head: bytes) -> bool:
    is_short = int.from_bytes(head[:_LENGTH_NBYTES], "little") <= MAX_HEADER_NBYTES
    return is_short and head[_LENGTH_NBYTES:].startswith(b"{")


SAFETENSORS = Format(
    name=_NAME,
    suffixes=(".safetensors",),
    # diffusers.utils.SAFETENSORS_WEIGHTS_NAME, transformers.utils.SAFE_WEIGHTS_NAME
    base_names={"diffusers": "diffusion_pytorch_model", "transformers": "model"},
    use_safetensors=True,
    can_be_linked=True,
    recognises=_recognises,
    read_header=read_header,
)
