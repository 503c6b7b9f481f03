"""Converts floating dtypes to the bits that `torch.Tensor.to(dtype)` gives, without torch.

Blocks of GGUF files too: the gguf package's numpy code makes float32 of any number of whole blocks.
So a worker calls it for as many blocks as its cache holds, and casts the result while it is there.

Importing torch costs a worker seconds and hundreds of MiB, so numpy and ml_dtypes do the
arithmetic, in `kernels`. They cannot know which NaN torch writes: that depends on the vector
instructions that torch's build uses on this CPU. If a block's result holds a NaN, torch is imported
and converts the block again. Other blocks never need torch.
"""

from typing import Final

import numpy as np

from shmload._checkpoints.dtypes import BLOCKS, NBITS, TORCH_NAMES
from shmload.workers.kernels import FLOAT_NBYTES, Bytes, Kernel, choose_kernel

# Elements converted at a time; even, because 8-bit sources are read in pairs. A scratch array of
# 4-byte elements is then 256 KiB, of which several fit the level-2 cache, and numpy's cost per call
# is spread thin. Measured on an EPYC 9004 with 1 MiB of level 2, F32 -> F16, 2026-11: 8 Ki elements
# 0.51 Gelem/s, 16 Ki 0.75, 32 Ki 0.91, 64 Ki 1.00, 128 Ki 1.04.
_TILE_COUNT: Final = 1 << 16
# Elements dequantised at a time. Measured on one core, 3072 x 3072 elements of Q4_K to bf16,
# 2026-11: 16 Ki 0.049 s, 32 Ki 0.035, 64 Ki 0.029, 128 Ki 0.029.
_BLOCKS_COUNT: Final = 1 << 16
# glibc gives arrays back to the kernel, and takes new pages for the next ones, until it has once
# freed an array as large as this. 733 MB of Q4_K to bf16 took 3.2 million page faults without that,
# and take 7 thousand.
_HEAP_NBYTES: Final = 8 << 20


def make_converter(source: str, target: str, max_count: int) -> "Converter | Dequantiser":
    """Return what converts elements, or blocks, of one dtype to another; see the two classes."""
    return Dequantiser(source, target) if source in BLOCKS else Converter(source, target, max_count)


class Converter:
    """Converts blocks of one floating dtype to another, as `torch.Tensor.to` does.

    It owns its scratch memory (1.2 MiB at most), so one converter is not for several threads.

    Args:
        source: safetensors name of the dtype that is read, one of `FLOAT_NBYTES`.
        target: safetensors name of the dtype that is written.
        max_count: the most elements that one call of `convert` may be given.

    Raises:
        ValueError: a dtype is not one of `FLOAT_NBYTES`, or `max_count` is negative.
    """

    def __init__(self, source: str, target: str, max_count: int) -> None:
        for dtype in (source, target):
            if dtype not in FLOAT_NBYTES:
                raise ValueError(f"cannot convert {dtype!r}, only {', '.join(FLOAT_NBYTES)}")
        if max_count < 0:
            raise ValueError(f"max_count is {max_count}; it must not be negative")
        self._source = source
        self._target = target
        self._max_count = max_count
        self._kernel: Kernel | None = None
        if source != target:
            self._kernel = choose_kernel(source, target, min(max_count, _TILE_COUNT))

    def convert(self, source: memoryview, target: memoryview, count: int) -> None:
        """Convert `count` elements from the front of `source` to the front of `target`.

        The first block of a process whose result holds a NaN, or overflows F8_E4M3, imports torch
        and takes seconds. No reference to a buffer remains after the call.

        Args:
            source: bytes, C-contiguous and aligned to their dtype; may be read-only.
            target: bytes, likewise, writable, which do not overlap `source`.
            count: number of elements, at most `max_count`.

        Raises:
            ValueError: `count` is out of range, or a buffer is too short for it.
        """
        if not 0 <= count <= self._max_count:
            raise ValueError(f"count is {count}; it must be within 0 and {self._max_count}")
        if count == 0:
            return
        source_nbytes, target_nbytes = FLOAT_NBYTES[self._source], FLOAT_NBYTES[self._target]
        read = np.frombuffer(source, np.uint8, count * source_nbytes)
        written = np.frombuffer(target, np.uint8, count * target_nbytes)
        if self._kernel is None:
            np.copyto(written, read)
            return
        # Overflow and NaN are results here, not mistakes to warn of.
        with np.errstate(all="ignore"):
            for start in range(0, count, _TILE_COUNT):
                stop = start + _TILE_COUNT
                tile = written[start * target_nbytes : stop * target_nbytes]
                if self._kernel(read[start * source_nbytes : stop * source_nbytes], tile):
                    # The whole block: where in a vector a NaN lies can decide its bits.
                    _convert_with_torch(read, self._source, written, self._target)
                    return


class Dequantiser:
    """Converts blocks of one kind to one floating dtype; not for several threads.

    Args:
        kind: ggml's name of the kind, one of `BLOCKS`.
        target: safetensors name of the dtype that is written.

    Raises:
        NotImplementedError: the gguf package does not dequantise the kind.
    """

    def __init__(self, kind: str, target: str) -> None:
        import gguf  # few checkpoints need it

        self._dequantise = gguf.dequantize
        self._kind = gguf.GGMLQuantizationType[kind]
        self._elements, self._nbytes = BLOCKS[kind]
        self._target_nbytes = NBITS[target] // 8 * self._elements
        self._converter = Converter("F32", target, _BLOCKS_COUNT)
        np.empty(_HEAP_NBYTES, np.uint8)

    def convert(self, source: memoryview, target: memoryview, count: int) -> None:
        """Convert `count` blocks from the front of `source` to the front of `target`.

        Args:
            source: bytes; may be read-only.
            target: bytes, writable, which do not overlap `source`.
            count: number of blocks.
        """
        most = _BLOCKS_COUNT // self._elements
        # Overflow and NaN are results here, not mistakes to warn of.
        with np.errstate(all="ignore"):
            for first in range(0, count, most):
                tile = min(most, count - first)
                begin = first * self._nbytes
                blocks = np.frombuffer(source, np.uint8, tile * self._nbytes, begin)
                # One row: the package divides several among calls of its own.
                values = self._dequantise(blocks.reshape(1, -1), self._kind)
                written = target[first * self._target_nbytes :]
                self._converter.convert(
                    values.reshape(-1).view(np.uint8).data, written, tile * self._elements
                )


def _convert_with_torch(source: Bytes, source_dtype: str, target: Bytes, target_dtype: str) -> None:
    """Convert a block with torch, since only torch knows which NaN it writes on this CPU.

    Overflow to F8_E4M3, which has no infinity, comes here too, because ml_dtypes makes it NaN.
    torch 2.13 makes it the greatest number, older releases make it NaN.
    """
    # Not at the top: the import takes seconds, and few checkpoints need it.
    import torch

    source_type: torch.dtype = getattr(torch, TORCH_NAMES[source_dtype])
    target_type: torch.dtype = getattr(torch, TORCH_NAMES[target_dtype])
    # A copy, because torch warns of memory that is read-only.
    values = torch.frombuffer(bytearray(source), dtype=source_type)
    torch.frombuffer(target, dtype=target_type).copy_(values)
