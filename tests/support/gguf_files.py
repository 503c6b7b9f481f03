"""Writes GGUF files, also such as no writer would."""

import struct

import gguf
import numpy as np
import torch

KINDS = {kind.name: kind for kind in gguf.GGMLQuantizationType}


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, packed):
    return text(key) + struct.pack("<I", kind) + packed


def entry(name, shape, kind, offset):
    number = kind if isinstance(kind, int) else int(KINDS[kind])
    sizes = tuple(reversed(shape))
    return (
        text(name)
        + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        + struct.pack("<IQ", number, offset)
    )


def front(tensors, pairs=0, *, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def padded(raw, alignment=32):
    return raw + bytes(-len(raw) % alignment)


def content(tensors, pairs=(), alignment=32):
    """Return a file of tensors, each a kind, a shape and bytes, by name."""
    entries, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        entries += entry(name, shape, kind, len(data))
        data = padded(data + raw, alignment)
    return padded(front(len(tensors), len(pairs)) + b"".join(pairs) + entries, alignment) + data


def save_blocks(tensors, path):
    """Save tensors, each a kind, a shape and its blocks as an array of bytes."""
    described = {name: (kind, shape, raw.tobytes()) for name, (kind, shape, raw) in tensors.items()}
    path.write_bytes(content(described))


def random_blocks(kind, shape, seed=0):
    """Return blocks without infinities, in the shape that the gguf package gives them."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    shape = (*shape[:-1], shape[-1] // elements * nbytes)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    rows = blocks.reshape(-1, nbytes)
    try:
        with np.errstate(all="ignore"):
            values = gguf.dequantize(rows, KINDS[kind])
    except NotImplementedError:
        return blocks
    rows[~np.isfinite(values).all(axis=1)] = 0
    return blocks


def dequantised(kind, blocks, dtype):
    """Return what the gguf package makes of blocks, as torch casts it."""
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks, KINDS[kind])
    return torch.from_numpy(values.copy()).to(dtype)
