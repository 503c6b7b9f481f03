"""Dequantises blocks of GGUF files as the gguf package does, and casts them as torch would.

The package's numpy code makes float32 of any number of whole blocks, without torch. So a worker
calls it for as many blocks as its cache holds, and casts the result while it is there.
"""

from typing import Final

import gguf
import numpy as np

from shmload._checkpoints.dtypes import BLOCKS, NBITS
from shmload.workers.convert import Converter

# Elements dequantised at a time. Measured on one core, 3072 x 3072 elements of Q4_K to bf16,
# 2026-11: 16 Ki 0.049 s, 32 Ki 0.035, 64 Ki 0.029, 128 Ki 0.029.
_TILE_COUNT: Final = 1 << 16
# glibc gives arrays back to the kernel, and takes new pages for the next ones, until it has once
# freed an array as large as this. 733 MB of Q4_K to bf16 took 3.2 million page faults without that,
# and take 7 thousand.
_HEAP_NBYTES: Final = 8 << 20


class Dequantiser:
    """Converts blocks of one kind to one floating dtype; not for several threads.

    Args:
        kind: ggml's name of the kind, one of `BLOCKS`.
        target: safetensors name of the dtype that is written.

    Raises:
        NotImplementedError: the gguf package does not dequantise the kind.
    """

    def __init__(self, kind: str, target: str) -> None:
        self._kind = gguf.GGMLQuantizationType[kind]
        self._elements, self._nbytes = BLOCKS[kind]
        self._target_nbytes = NBITS[target] // 8 * self._elements
        self._converter = Converter("F32", target, _TILE_COUNT)
        np.empty(_HEAP_NBYTES, np.uint8)

    def convert(self, source: memoryview, target: memoryview, count: int) -> None:
        """Convert `count` blocks from the front of `source` to the front of `target`.

        Args:
            source: bytes; may be read-only.
            target: bytes, writable, which do not overlap `source`.
            count: number of blocks.
        """
        most = _TILE_COUNT // self._elements
        # Overflow and NaN are results here, not mistakes to warn of.
        with np.errstate(all="ignore"):
            for first in range(0, count, most):
                tile = min(most, count - first)
                begin = first * self._nbytes
                blocks = np.frombuffer(source, np.uint8, tile * self._nbytes, begin)
                # One row: the package divides several among calls of its own.
                values = gguf.dequantize(blocks.reshape(1, -1), self._kind)
                written = target[first * self._target_nbytes :]
                self._converter.convert(
                    values.reshape(-1).view(np.uint8).data, written, tile * self._elements
                )
