"""Whether the installed gguf package dequantises what a load wants as floats."""

import os
from collections.abc import Callable, Iterable

from shmload._checkpoints.blocks import BLOCKS
from shmload._checkpoints.header import TensorSpec
from shmload.errors import KindNotDequantised
from shmload.errors.libraries import needing


def require_dequantised(
    path: str | os.PathLike[str],
    tensors: Iterable[TensorSpec],
    dtype_of: Callable[[TensorSpec], str],
) -> None:
    """Check that workers can dequantise the tensors of a file that are wanted as floats.

    Imports the gguf package, if there are any: 0.1 s.

    Args:
        path: of the file, for errors.
        tensors: of the file.
        dtype_of: the dtype of each tensor in the segment.

    Raises:
        LibraryMissing: the gguf package is not installed.
        KindNotDequantised: it does not know a kind.
    """
    checked = set()
    for tensor in tensors:
        kind = tensor.dtype
        if kind in BLOCKS and kind not in checked and dtype_of(tensor) != kind:
            checked.add(kind)
            if not _is_dequantised(path, kind):
                raise KindNotDequantised(path, tensor.name, kind)


def _is_dequantised(path: str | os.PathLike[str], kind: str) -> bool:
    with needing("gguf", f"dequantising {path}", "gguf"):
        import gguf
    import numpy as np

    block = np.zeros((1, BLOCKS[kind][1]), np.uint8)
    try:
        gguf.dequantize(block, gguf.GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError):  # an older package does not even have its name
        return False
    return True
