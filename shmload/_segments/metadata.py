"""The metadata in a segment's header: its shard, conversion, creator and digest.

Guarantee: the keys `shmload.*` of a segment's header are written and read here only. The digest is
written last, over a digest of zeros: a segment that has one is complete.
"""

import os
import time
from collections.abc import Mapping

import msgspec

from shmload._version import __version__
from shmload._wording import printable

_SOURCE_KEY = "shmload.source"
_IDENTITY_KEY = "shmload.identity"
_CONVERSION_KEY = "shmload.conversion"
_CREATED_AT_KEY = "shmload.created_at"
_CREATOR_KEY = "shmload.creator"
_DIGEST_KEY = "shmload.digest"
_NO_DIGEST = "0" * 32

UNFINISHED = {_DIGEST_KEY: _NO_DIGEST}
"""The digest's entry in the metadata of a segment that is not complete."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment's header says about it."""

    source: str = ""
    """Path of the shard that was decoded; characters that do not print are escaped."""
    identity: str = ""
    """The shard's `Identity.key` when it was decoded."""
    conversion: str = ""
    """What was done to its dtypes, or `raw`."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    creator: str = ""
    """Version and process that decoded it."""
    digest: str = ""
    """Digest of the data, 32 hexadecimal digits; empty while the segment is not complete."""


def make_metadata(source: str, identity: str, conversion: str) -> dict[str, str]:
    """Return the entries for the header of a new segment, without its digest.

    Args:
        source: path of the shard.
        identity: the shard's `Identity.key`.
        conversion: what is done to its dtypes, or `raw`.
    """
    return {
        _SOURCE_KEY: printable(source),
        _IDENTITY_KEY: identity,
        _CONVERSION_KEY: conversion,
        _CREATED_AT_KEY: f"{time.time():.3f}",
        _CREATOR_KEY: f"shmload {__version__} pid {os.getpid()}",
    }


def parse_metadata(entries: Mapping[str, str] | None) -> Metadata:
    """Read the metadata of a segment's header; an entry that is missing has its default.

    Raises:
        ValueError: the time is not a number.
    """
    entries = entries or {}
    return Metadata(
        source=entries.get(_SOURCE_KEY, ""),
        identity=entries.get(_IDENTITY_KEY, ""),
        conversion=entries.get(_CONVERSION_KEY, ""),
        created_at=float(entries.get(_CREATED_AT_KEY, 0)),
        creator=entries.get(_CREATOR_KEY, ""),
        digest=read_digest(entries) or "",
    )


def read_digest(entries: Mapping[str, str] | None) -> str | None:
    """Return the digest in a segment's metadata, or None while the segment is not complete."""
    digest = (entries or {}).get(_DIGEST_KEY, _NO_DIGEST)
    return None if digest == _NO_DIGEST else digest


def find_digest(header: bytes) -> int:
    """Return the offset of the digest's digits in a segment's header, in bytes."""
    return header.index(f'"{_DIGEST_KEY}":"'.encode()) + len(_DIGEST_KEY) + 4
