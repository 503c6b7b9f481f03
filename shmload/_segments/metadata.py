r"""The metadata in a segment's header: its shard, conversion, creator and digest.

Guarantee: the keys `shmload:*` of a segment's header are written and read here only. The digest is
written last, over a digest of zeros: a segment that has one is complete. Only `keep_for` is written
anew later.

A path is bytes, and a header is UTF-8. Text that is not UTF-8 has its odd bytes as `\xNN`. It does
not depend on the locale, so every process reads the same path.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.header import TensorSpec
from shmload._version import __version__

_T = TypeVar("_T", bound=msgspec.Struct)
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")


_SOURCE_KEY = "shmload:source"
_IDENTITY_KEY = "shmload:identity"
_CONVERSION_KEY = "shmload:conversion"
_DTYPE_KEY = "shmload:dtype"
_CREATED_AT_KEY = "shmload:created_at"
_CREATOR_KEY = "shmload:creator"
_KEEP_FOR_KEY = "shmload:keep_for"
_DIGEST_KEY = "shmload:digest"
_NO_DIGEST = "0" * 32
_KEEP_FOR_NDIGITS = 10
_HEADER_BEGIN = b'{"__metadata__":{"' + _KEEP_FOR_KEY.encode() + b'":"'
_METADATA_BEGIN = 8 + _HEADER_BEGIN.rindex(b"{")
# Enough for almost all metadata; the entries of the tensors come behind it.
_READ_NBYTES = 8192
_DECODER = json.JSONDecoder()

UNFINISHED = {_DIGEST_KEY: _NO_DIGEST}
"""The digest's entry in the metadata of a segment that is not complete."""

FOR_EVER = {_KEEP_FOR_KEY: "0" * _KEEP_FOR_NDIGITS}
"""The entry that says how long an idle segment stays. It is the first in the header, at a place
that does not depend on the rest, and may be written anew while the segment is resident."""

KEEP_FOR_OFFSET = 8 + len(_HEADER_BEGIN)
"""Where a segment has the digits of `keep_for`, in bytes; the header's length comes first."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment's header says about it."""

    source: str = ""
    """Path of the shard that was decoded, as `source_text` writes it."""
    identity: str = ""
    """The shard's `Identity.key` when it was decoded."""
    conversion: str = ""
    """What was done to its dtypes, or `raw`."""
    dtype: str = ""
    """torch's name of the dtype that its floats got; if it is `raw`, of most of its bytes."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    creator: str = ""
    """Version and process that decoded it."""
    digest: str = ""
    """Digest of the data, 32 hexadecimal digits; empty while the segment is not complete."""
    keep_for_s: int = 0
    """How long it stays while no process uses it, in seconds; 0 if nothing limits that."""


def make_metadata(source: str, identity: str, conversion: str) -> dict[str, str]:
    """Return the entries for the header of a new segment, without its digest.

    Args:
        source: path of the shard.
        identity: the shard's `Identity.key`.
        conversion: what is done to its dtypes, or `raw`.
    """
    return {
        _SOURCE_KEY: source_text(source),
        _IDENTITY_KEY: identity,
        _CONVERSION_KEY: conversion,
        _CREATED_AT_KEY: f"{time.time():.3f}",
        _CREATOR_KEY: f"shmload {__version__} pid {os.getpid()}",
    }


def parse_metadata(entries: Mapping[str, str] | None) -> Metadata:
    """Read the metadata of a segment's header; an entry that is missing has its default.

    Raises:
        ValueError: a time is not a number.
    """
    entries = entries or {}
    return Metadata(
        source=entries.get(_SOURCE_KEY, ""),
        identity=entries.get(_IDENTITY_KEY, ""),
        conversion=entries.get(_CONVERSION_KEY, ""),
        dtype=entries.get(_DTYPE_KEY, ""),
        created_at=float(entries.get(_CREATED_AT_KEY, 0)),
        creator=entries.get(_CREATOR_KEY, ""),
        digest=read_digest(entries) or "",
        keep_for_s=int(entries.get(_KEEP_FOR_KEY, 0)),
    )


def read_metadata(fd: int) -> Metadata | None:
    """Read what the header of an open segment or part says, without the entries of its tensors.

    Returns:
        None if that is impossible: the header is damaged, of an earlier version, or not written
        yet. `Segment.read_header` says more.
    """
    begin = os.pread(fd, _READ_NBYTES, 0)
    if read_keep_for(begin) is None:
        return None
    try:
        _, end = _DECODER.raw_decode(begin.decode("latin-1"), _METADATA_BEGIN)
        entries = msgspec.json.decode(begin[_METADATA_BEGIN:end], type=dict[str, str])
        metadata = parse_metadata(entries)
    except ValueError:  # it may be longer than what was read
        return None
    return metadata if metadata.dtype else None


def dtype_entry(tensors: Sequence[TensorSpec], entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entry for the header of a new segment that says its dtype.

    Args:
        tensors: of the shard.
        entries: from `make_metadata`.
    """
    return {_DTYPE_KEY: main_dtype(tensors, entries.get(_CONVERSION_KEY, ""))}


def main_dtype(tensors: Sequence[TensorSpec], conversion: str) -> str:
    """Return torch's name of the dtype that a segment's floats got, or of most of its bytes.

    Args:
        tensors: of the shard.
        conversion: as in its metadata.
    """
    target = conversion.partition("/")[0]
    if target not in TORCH_NAMES:  # raw: the tensors are as the file has them
        nbytes: dict[str, int] = {}
        for tensor in tensors:
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
        target = max(nbytes, key=lambda dtype: nbytes[dtype], default="")
    return TORCH_NAMES.get(target, target)


def write_keep_for(keep_for_s: int) -> bytes:
    """Return the digits of a time in seconds, for `KEEP_FOR_OFFSET`."""
    return str(min(keep_for_s, 10**_KEEP_FOR_NDIGITS - 1)).zfill(_KEEP_FOR_NDIGITS).encode()


def read_keep_for(begin: bytes) -> int | None:
    """Return `Metadata.keep_for_s` from the first 64 bytes of a segment.

    Returns:
        None if the segment is of a version that did not have the entry.
    """
    digits = begin[KEEP_FOR_OFFSET : KEEP_FOR_OFFSET + _KEEP_FOR_NDIGITS]
    is_there = begin[8:KEEP_FOR_OFFSET] == _HEADER_BEGIN and digits.isdigit()
    return int(digits) if is_there else None


def read_digest(entries: Mapping[str, str] | None) -> str | None:
    """Return the digest in a segment's metadata, or None while the segment is not complete."""
    digest = (entries or {}).get(_DIGEST_KEY, _NO_DIGEST)
    return None if digest == _NO_DIGEST else digest


def find_digest(header: bytes) -> int:
    """Return the offset of the digest's digits in a segment's header, in bytes."""
    return header.index(f'"{_DIGEST_KEY}":"'.encode()) + len(_DIGEST_KEY) + 4


def source_text(path: str) -> str:
    """Return the text of a path; it can be printed, and written as UTF-8."""
    raw = os.fsencode(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.replace(b"\\", rb"\x5c").decode("utf-8", "backslashreplace")


def source_paths(text: str) -> tuple[str, ...]:
    r"""Return the paths that a text can stand for, the likelier one first.

    A name may itself contain `\xNN`, so there can be two. An `Identity` tells which one it is.
    """
    raw = text.encode()
    unescaped = _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), raw)
    return tuple(os.fsdecode(path) for path in dict.fromkeys((raw, unescaped)))


def encode_paths(record: msgspec.Struct) -> bytes:
    """Return a record that has paths as JSON, the same in every locale.

    Raises:
        UnicodeEncodeError: a text in it is no path.
    """
    return os.fsencode(json.dumps(msgspec.to_builtins(record), ensure_ascii=False))


def decode_paths(content: bytes, kind: type[_T]) -> _T:
    """Return the record that `encode_paths` has written.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.convert(json.loads(os.fsdecode(content)), kind)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
