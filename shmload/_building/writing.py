"""A segment of what this process has in memory: its header, its bytes and its digest."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.header import Header, TensorSpec
from shmload._host.shm import write_at
from shmload._segments.layout import Layout, lay_out
from shmload._segments.metadata import Metadata
from shmload._segments.part import Part
from shmload._segments.segment import Segment, Stay
from shmload._segments.upkeep import digest_data

_DTYPES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
# At a time: a part that is written grows steadily, and `shmload ls` shows how far it is.
_BLOCK_NBYTES = 64 << 20


class Content(NamedTuple):
    """What a segment has under a name."""

    dtype: str
    """As safetensors names it."""
    bytes: memoryview
    itemsize: int


def content_of(content: memoryview, dtype: torch.dtype) -> Content:
    """Return bytes that tensors of a dtype lie in; of whole elements as that, else as bytes."""
    name = _DTYPES.get(str(dtype).removeprefix("torch."), "U8")
    is_whole = name != "U8" and content.nbytes % dtype.itemsize == 0
    return Content(name if is_whole else "U8", content, dtype.itemsize if is_whole else 1)


def plan(contents: Mapping[str, Content], metadata: Metadata) -> Layout:
    """Lay out a segment.

    Args:
        contents: by name.
        metadata: what its header is to say.
    """
    specs = []
    position = 0
    for name, content in contents.items():
        nbytes = content.bytes.nbytes
        count = nbytes // content.itemsize
        specs.append(TensorSpec(name, content.dtype, (count,), position, position + nbytes))
        position += nbytes
    header = Header(tensors=tuple(specs), metadata=None, data_offset=0)
    return lay_out(header, lambda spec: spec.dtype, metadata)


def fill(part: Part, contents: Mapping[str, Content], *, is_pinned: bool = False) -> Segment:
    """Write what was laid out, and give the part its name; return the segment.

    Args:
        part: has its header and its length.
        contents: as for `plan`.
        is_pinned: whether it is pinned from the first.
    """
    written = Segment(part.name, part.fd).read_header()
    for spec in written.tensors:
        content = contents[spec.name].bytes
        for begin in range(0, spec.nbytes, _BLOCK_NBYTES):
            at = written.data_offset + spec.begin + begin
            write_at(part.fd, content[begin : begin + _BLOCK_NBYTES], at)
    return part.publish(digest_data(part.fd, written), Stay.RESIDENT, is_pinned=is_pinned)
