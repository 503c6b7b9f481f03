"""A toy format of checkpoint files, unlike safetensors, to show what a new format needs.

A file is a magic number, the tensors' bytes in any order with garbage between them, a JSON trailer,
and the trailer's length.
"""

import json
import os
import random

import torch

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.header import Format, Header, TensorSpec, truncated
from shmload.errors import ShardMalformed

_MAGIC = b"TOY\x00"
_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}


def read_header(fd, path):
    nbytes = os.fstat(fd).st_size
    if nbytes < len(_MAGIC) + 8:
        raise truncated(path, len(_MAGIC) + 8, nbytes)
    length = int.from_bytes(os.pread(fd, 8, nbytes - 8), "little")
    try:
        entries = json.loads(os.pread(fd, min(length, nbytes - 8), max(0, nbytes - 8 - length)))
        specs = [
            TensorSpec(name, dtype, tuple(shape), begin, end)
            for name, dtype, shape, begin, end in entries
        ]
        for spec in specs:
            if not len(_MAGIC) <= spec.begin <= spec.end <= nbytes:
                raise ValueError(f"{spec.name!r} lies outside the file")
            if NBITS[spec.dtype] * torch.Size(spec.shape).numel() != 8 * spec.nbytes:
                raise ValueError(f"{spec.name!r} has another size")
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError) as exc:
        raise ShardMalformed(
            f"{path} is not a valid toy file: its trailer is wrong ({exc})", path=path
        ) from exc
    return Header(tensors=tuple(specs), metadata=None, data_offset=0)


TOY = Format(
    name="toy",
    suffixes=(".toy",),
    base_names={"diffusers": "toy_model", "transformers": "toy"},
    can_be_linked=False,
    recognises=lambda head: head.startswith(_MAGIC),
    read_header=read_header,
)


def save_toy(tensors, path, seed=0):
    """Write tensors in a random order with gaps; the trailer lists them in another order."""
    at_random = random.Random(seed)
    names = list(tensors)
    at_random.shuffle(names)
    content = bytearray(_MAGIC)
    entries = []
    for name in names:
        tensor = tensors[name]
        content += at_random.randbytes(at_random.choice([0, 1, 3, 64, 5000]))
        dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        begin = len(content)
        content += tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        entries.append((name, dtype, tuple(tensor.shape), begin, len(content)))
    at_random.shuffle(entries)
    trailer = json.dumps(entries).encode()
    path.write_bytes(content + trailer + len(trailer).to_bytes(8, "little"))
