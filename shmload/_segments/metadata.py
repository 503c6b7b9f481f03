r"""The metadata in a segment's header: its shard, conversion, creator and digest.

It is the first entry of the header: a text that begins with `keep_for` and the digest, so that both
have places that do not depend on the rest. The digest is written last, over a digest of zeros: a
segment that has one is complete. Only `keep_for` is written anew later.

A path is bytes, and a header is UTF-8. In a header a path is read as UTF-8 whatever the locale, so
every process reads the same one; bytes of it that are no text are lone surrogates in JSON.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES, prevailing_dtype
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.source import INDEX, MODULAR_INDEX, Source
from shmload._segments.names import identify

_IN_HUB_CACHE = re.compile(r".*/models--(?P<id>[^/]+)/snapshots/[^/]+", re.DOTALL)
_KEY = "shmload"
_PATHS = {"source", "model", "root"}
_BEGIN = b'{"__metadata__":{"' + _KEY.encode() + b'":"'
_KEEP_FOR_NDIGITS = 10
_NO_DIGEST = "0" * 32
# The longest paths take 28 KiB each: every byte of them may be a surrogate, escaped twice.
_READ_NBYTES = 64 << 10
_DECODER = json.JSONDecoder()

KEEP_FOR_OFFSET = 8 + len(_BEGIN)
"""Where a segment has the digits of `keep_for`, in bytes; the header's length comes first."""

DIGEST_OFFSET = KEEP_FOR_OFFSET + _KEEP_FOR_NDIGITS + 1
"""Where a segment has the 32 digits of its digest, in bytes."""

BUILT_SUFFIX = "/built"
"""Ends the identity of a built object, after that of a shard of its model."""

_TEXT_BEGIN = _KEEP_FOR_NDIGITS + len(_NO_DIGEST) + 2


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a segment's header says about it."""

    source: str = ""
    """Path of the shard that was decoded, or the name of a publication."""
    model: str = ""
    """The model that it was decoded for: its hub id, its URL, or the name of its directory or
    file; empty for a publication, and of what a load has built."""
    root: str = ""
    """Path of the directory or file that the model is loaded from."""
    component: str = ""
    """Which component of the model it is a part of; empty for a model without components."""
    variant: str = ""
    """The variant that was asked for, such as `fp16`."""
    identity: str = ""
    """The shard's, by `names.identify`, when it was decoded; the same for all links to one file."""
    conversion: str = ""
    """What was done to its dtypes, or `raw`."""
    dtype: str = ""
    """torch's name of the dtype that its floats got; if it is `raw`, of most of its bytes."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    digest: str = ""
    """XXH3-128 of the XXH3-128 of each 64 MiB of its data; empty while it is not complete."""
    keep_for_s: int = 0
    """How long it stays while no process uses it, in seconds; 0 if nothing limits that."""
    needs: tuple[str, ...] = ()
    """Segments with the rest of a publication's or built object's tensors; empty for others."""
    kept: str = ""
    """What a built object keeps: `whole`, or `models` or `nothing` with the reason; else empty."""


def home_of(source: Source, component: str) -> Metadata:
    """Return metadata that say which model a component of a source belongs to, and no more.

    A folder of a pipeline that is loaded alone is a component of the pipeline.
    """
    root, given = os.path.abspath(source.root), os.fspath(source.given)
    above, name = os.path.split(root)
    if any(os.path.exists(os.path.join(above, index)) for index in (INDEX, MODULAR_INDEX)):
        root, component = above, name
    in_hub_cache = _IN_HUB_CACHE.fullmatch(root)
    if in_hub_cache:
        model = in_hub_cache["id"].replace("--", "/")
    else:
        model = given if is_url(given) else os.path.basename(root)
    return Metadata(model=model, root=root, component=component, variant=source.variant or "")


NOWHERE = Metadata()
"""Of a segment of no model."""


def make_metadata(
    source: str, identity: str, conversion: str, home: Metadata = NOWHERE
) -> Metadata:
    """Return what the header of a new segment is to say.

    Args:
        source: path of the shard, or the name of a publication.
        identity: of the shard.
        conversion: what is done to its dtypes, or `raw`.
        home: says which model it belongs to.
    """
    return msgspec.structs.replace(
        home,
        source=source,
        identity=identity,
        conversion=conversion,
        created_at=round(time.time(), 3),
    )


def built_metadata(file: str, kept: str) -> Metadata:
    """Return what the header of a built object's segment is to say.

    Args:
        file: path of a shard of its model.
        kept: as in `Metadata`.
    """
    identity = identify(file, os.stat(file)) + BUILT_SUFFIX
    return msgspec.structs.replace(make_metadata(file, identity, "built"), kept=kept)


def header_entries(metadata: Metadata, own: Mapping[str, str] | None) -> dict[str, str]:
    """Return the metadata of a new segment's header, with a digest of zeros.

    Args:
        metadata: what it says.
        own: that of the shard.
    """
    front = f"{write_keep_for(0).decode()} {_NO_DIGEST} "
    # transformers 4.57 requires the framework in files that have any metadata.
    others = {"format": "pt"} if own is None else {k: v for k, v in own.items() if k != _KEY}
    fields = msgspec.to_builtins(metadata)
    fields |= {
        name: os.fsencode(fields[name]).decode(errors="surrogateescape")
        for name in _PATHS & fields.keys()
    }
    return {_KEY: front + json.dumps(fields)} | others


def read_metadata(fd: int) -> Metadata | None:
    """Read what the header of an open segment or part says, without the entries of its tensors.

    Returns:
        None if that is impossible: the header is damaged, of an earlier version, or not written
        yet. `Segment.read_header` says more.
    """
    begin = os.pread(fd, _READ_NBYTES, 0)
    if not begin.startswith(_BEGIN, 8):
        return None
    try:
        _, end = _DECODER.raw_decode(begin.decode("latin-1"), KEEP_FOR_OFFSET - 1)
        entry = msgspec.json.decode(begin[KEEP_FOR_OFFSET - 1 : end], type=str)
        fields = json.loads(entry[_TEXT_BEGIN:])
        for name in _PATHS & fields.keys():
            fields[name] = os.fsdecode(fields[name].encode(errors="surrogateescape"))
        metadata = msgspec.convert(fields, Metadata)
        keep_for_s = int(entry[:_KEEP_FOR_NDIGITS])
    except (ValueError, TypeError, AttributeError, msgspec.MsgspecError):  # another's text
        return None
    digest = entry[_KEEP_FOR_NDIGITS + 1 : _TEXT_BEGIN - 1].replace(_NO_DIGEST, "")
    return msgspec.structs.replace(metadata, digest=digest, keep_for_s=keep_for_s)


def main_dtype(tensors: Sequence[TensorSpec], conversion: str) -> str:
    """Return torch's name of the dtype that a segment's floats got, or of most of its bytes.

    Args:
        tensors: of the shard.
        conversion: as in its metadata.
    """
    target = conversion.partition("/")[0]
    if target not in TORCH_NAMES:  # raw: the tensors are as the file has them
        target = prevailing_dtype((each.dtype, each.nbytes) for each in tensors)
    return TORCH_NAMES.get(target, target)


def write_keep_for(keep_for_s: int) -> bytes:
    """Return the digits of a time in seconds, for `KEEP_FOR_OFFSET`."""
    return str(min(keep_for_s, 10**_KEEP_FOR_NDIGITS - 1)).zfill(_KEEP_FOR_NDIGITS).encode()


def read_keep_for(fd: int) -> int:
    """Return `Metadata.keep_for_s` of an open segment; 0 if it is damaged."""
    digits = os.pread(fd, _KEEP_FOR_NDIGITS, KEEP_FOR_OFFSET)
    return int(digits) if digits.isdigit() else 0
