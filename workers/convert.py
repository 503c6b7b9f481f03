"""Converts floating dtypes to the bits `torch.Tensor.to(dtype)` gives, without torch.

Importing torch costs a worker seconds and hundreds of MiB, so numpy and ml_dtypes do the
arithmetic. What they cannot know is which NaN torch writes: that depends on the vector path its
build takes on this CPU. So a block whose result holds a NaN is converted again by torch, which is
imported at that moment; no other block ever touches it.

torch converts every pair through float32, double rounding included, and so does this module:

    F64 -> F32                     numpy
    F32 -> F64, BF16               numpy, ml_dtypes
    F32 -> F16, F8_E4M3, F8_E5M2   arithmetic on the bits (`_RoundToSmall`)
    F32 -> other 8 bits            to 16 bits without harm, then a table (`_RoundToOdd`, `_Lookup`)
    BF16, F16 -> F32               ml_dtypes, scaling (`_WidenFloat16`)
    BF16, F16 -> 16 or 8 bits      a table of all patterns (`_Lookup`)
    8 bits -> any                  a table of all pairs of patterns (`_Lookup`)
"""

import functools
from typing import Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shmload._dtypes import TORCH_NAMES

_NUMPY_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

FLOAT_NBYTES: Final[dict[str, int]] = {name: d.itemsize for name, d in _NUMPY_DTYPES.items()}
"""The dtypes a `Converter` takes, by safetensors name, and the bytes of one element."""

# The lowest positive pattern that is NaN: those above it are NaN too, and so with the sign bit.
_FIRST_NAN: Final[dict[str, int]] = {
    "F16": 0x7C01,
    "BF16": 0x7F81,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7D,
}

# Elements converted at a time; even, because 8-bit sources are read in pairs. A scratch array of
# 4-byte elements is then 256 KiB, of which several fit the level-2 cache, and numpy's cost per call
# is spread thin. Measured on an EPYC 9004 with 1 MiB of level 2, F32 -> F16: 8 Ki elements
# 0.57 Gelem/s, 16 Ki 0.79, 32 Ki 0.99, 64 Ki 1.05.
_TILE_COUNT: Final = 1 << 16

_Bytes = npt.NDArray[np.uint8]


class Converter:
    """Converts blocks of one floating dtype to another, as `torch.Tensor.to` does.

    It owns its scratch memory (1.5 MiB at most), so one converter is not for several threads.

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
        self._kernel = _choose_kernel(source, target, min(max_count, _TILE_COUNT))

    def convert(self, source: memoryview, target: memoryview, count: int) -> None:
        """Convert `count` elements from the front of `source` to the front of `target`.

        The first block of a process whose result holds a NaN, or overflows F8_E4M3, imports torch
        and takes seconds. Neither buffer is referred to after the call.

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
        if self._source == self._target:
            np.copyto(written, read)
            return
        # Overflow and NaN are results here, not mistakes to warn of.
        with np.errstate(all="ignore"):
            for start in range(0, count, _TILE_COUNT):
                stop = start + _TILE_COUNT
                tile = written[start * target_nbytes : stop * target_nbytes]
                self._kernel(read[start * source_nbytes : stop * source_nbytes], tile)
                if _has_nan(tile, self._target):
                    # The whole block: where in a vector a NaN lies can decide its bits.
                    _convert_with_torch(read, self._source, written, self._target)
                    return


def _has_nan(tile: _Bytes, dtype: str) -> bool:
    """Tell whether a tile holds a NaN, in one or two reductions, a twentieth of its conversion."""
    if dtype in ("F64", "F32"):
        # The greatest of numbers among which there is a NaN is NaN.
        return bool(np.isnan(np.maximum.reduce(tile.view(_NUMPY_DTYPES[dtype]))))
    if dtype == "F8_E8M0":
        return int(np.maximum.reduce(tile)) == 0xFF
    if dtype in ("F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        return int(np.minimum.reduce(tile.view(np.int8))) == -0x80
    # NaN are the greatest patterns: with a clear sign bit when read as signed, with a set one
    # when read as unsigned.
    is_wide = FLOAT_NBYTES[dtype] == 2
    greatest_positive = int(np.maximum.reduce(tile.view(np.int16 if is_wide else np.int8)))
    greatest = int(np.maximum.reduce(tile.view(np.uint16 if is_wide else np.uint8)))
    sign = 0x8000 if is_wide else 0x80
    return greatest_positive >= _FIRST_NAN[dtype] or greatest >= sign | _FIRST_NAN[dtype]


def _convert_with_torch(
    source: _Bytes, source_dtype: str, target: _Bytes, target_dtype: str
) -> None:
    """Convert a block with torch, the only one to know which NaN it writes on this CPU.

    It also decides about overflow to F8_E4M3, which has no infinity. ml_dtypes makes it NaN, and
    so it comes here; torch 2.13 makes it the greatest number, older releases made it NaN.
    """
    # Not at the top: the import takes seconds, and hardly any checkpoint needs it.
    import torch

    source_type: torch.dtype = getattr(torch, TORCH_NAMES[source_dtype])
    target_type: torch.dtype = getattr(torch, TORCH_NAMES[target_dtype])
    # A copy, because torch warns of memory that is read-only.
    values = torch.frombuffer(bytearray(source), dtype=source_type)
    torch.frombuffer(target, dtype=target_type).copy_(values)


class _Kernel(Protocol):
    """Converts the elements in `source` into `target`, at most as many as it was made for."""

    def __call__(self, source: _Bytes, target: _Bytes) -> None: ...


def _choose_kernel(source: str, target: str, max_count: int) -> _Kernel:
    source_nbytes, target_nbytes = FLOAT_NBYTES[source], FLOAT_NBYTES[target]
    if source_nbytes == 1 or (source_nbytes == 2 and target_nbytes <= 2):
        return _Lookup(source, target, max_count)
    if "F32" not in (source, target):
        to_float32 = _choose_kernel(source, "F32", max_count)
        from_float32 = _choose_kernel("F32", target, max_count)
        return _Chain(to_float32, from_float32, max_count, source_nbytes, 4)
    if source == "F16":
        return _WidenFloat16()
    if target in ("F16", "F8_E4M3", "F8_E5M2"):
        return _RoundToSmall(target, max_count)
    if target_nbytes == 1:
        # Patterns rounded to odd are BF16 to the table, and its index.
        return _Chain(_RoundToOdd(max_count), _Lookup("BF16", target, max_count), max_count, 4, 2)
    return _Cast(source, target)


class _Chain:
    """Two kernels, with memory between them for elements of `middle_nbytes` bytes each."""

    def __init__(
        self, first: _Kernel, last: _Kernel, max_count: int, source_nbytes: int, middle_nbytes: int
    ) -> None:
        self._first = first
        self._last = last
        self._source_nbytes = source_nbytes
        self._middle_nbytes = middle_nbytes
        self._middle = np.empty(max_count * middle_nbytes, np.uint8)

    def __call__(self, source: _Bytes, target: _Bytes) -> None:
        middle = self._middle[: source.size // self._source_nbytes * self._middle_nbytes]
        self._first(source, middle)
        self._last(middle, target)


class _Cast:
    """The libraries' own conversion; fast enough only for the pairs that no other kernel takes."""

    def __init__(self, source: str, target: str) -> None:
        self._source = _NUMPY_DTYPES[source]
        self._target = _NUMPY_DTYPES[target]

    def __call__(self, source: _Bytes, target: _Bytes) -> None:
        np.copyto(target.view(self._target), source.view(self._source), casting="unsafe")


class _WidenFloat16:
    """F16 -> F32: the bits moved to their places make a float32 that is 2**-112 of the value."""

    _SCALE: Final = np.float32(2.0**112)

    def __call__(self, source: _Bytes, target: _Bytes) -> None:
        # Infinity and NaN have an exponent that does not scale.
        if _has_nan_or_infinity(source):
            _Cast("F16", "F32")(source, target)
            return
        bits, values = target.view(np.int32), target.view(np.float32)
        np.copyto(bits, source.view(np.int16))
        np.left_shift(bits, 13, out=bits)
        # Of the sign, which filled the upper half, keep the topmost bit.
        np.bitwise_and(bits, ~0x70000000, out=bits)
        np.multiply(values, self._SCALE, out=values)


def _has_nan_or_infinity(tile: _Bytes) -> bool:
    return (
        int(np.maximum.reduce(tile.view(np.int16))) >= 0x7C00
        or int(np.maximum.reduce(tile.view(np.uint16))) >= 0xFC00
    )


class _RoundToSmall:
    """F32 -> F16, F8_E4M3 or F8_E5M2, by letting one float32 addition do the rounding.

    Let x be the absolute value, 2**e its power of two (but no lower than that of the smallest
    normal number of the target) and `dropped` the mantissa bits that the target has less. The sum
    x + 2**(e + dropped) has no place for just those bits, so the processor rounds them away, to
    nearest and ties to even, also where the target is subnormal. The mantissa of the sum is then
    x in units of the target's last place, and its exponent tells e: the target's pattern is the
    mantissa plus e, shifted to its place, less a constant. One multiplication adds the two in the
    topmost bits, and the constant is put into the mantissa beforehand.
    """

    def __init__(self, target: str, max_count: int) -> None:
        limits = ml_dtypes.finfo(_NUMPY_DTYPES[target])
        nbits = 8 * FLOAT_NBYTES[target]
        dropped = 23 - int(limits.nmant)
        greatest, smallest_normal = np.array([limits.max, limits.smallest_normal], np.float32).view(
            np.uint32
        )
        self._cast = _Cast("F32", target)
        self._greatest = int(greatest)
        self._shift = np.uint32(32 - nbits)
        bias = ((int(smallest_normal) >> 23) + dropped) << int(limits.nmant)
        self._step = np.uint32((dropped << 23) + (-bias) % (1 << nbits))
        self._factor = np.uint32((1 << (32 - nbits)) + (1 << (32 - nbits - dropped)))
        # An array, because with a scalar numpy's maximum takes a loop three times as slow.
        self._floor = np.full(max_count, smallest_normal, np.uint32)
        self._sum = np.empty(max_count, np.uint32)
        self._power = np.empty(max_count, np.uint32)
        self._code = np.dtype(f"u{FLOAT_NBYTES[target]}")

    def __call__(self, source: _Bytes, target: _Bytes) -> None:
        bits = source.view(np.uint32)
        total, power = self._sum[: bits.size], self._power[: bits.size]
        np.bitwise_and(bits, np.uint32(0x7FFFFFFF), out=total)
        if int(np.maximum.reduce(total)) > self._greatest:
            # Overflow, infinity, NaN: rare, and the slow way is right about them.
            self._cast(source, target)
            return
        np.bitwise_and(bits, np.uint32(0x7F800000), out=power)
        np.maximum(power, self._floor[: bits.size], out=power)
        np.add(power, self._step, out=power)
        np.add(total.view(np.float32), power.view(np.float32), out=total.view(np.float32))
        np.multiply(total, self._factor, out=total)
        np.bitwise_and(bits, np.uint32(0x80000000), out=power)
        np.bitwise_or(total, power, out=total)
        np.right_shift(total, self._shift, out=total)
        np.copyto(target.view(self._code), total, casting="unsafe")


class _RoundToOdd:
    """F32 -> its upper 16 bits, the last of which is set if any bit below them was.

    A further rounding to nearest is then what it would be from all 32 bits, provided it drops at
    least two more; 8-bit targets do, with 4 bits of precision at most.
    """

    def __init__(self, max_count: int) -> None:
        self._scratch = np.empty(max_count, np.uint32)

    def __call__(self, source: _Bytes, target: _Bytes) -> None:
        bits = source.view(np.uint32)
        scratch = self._scratch[: bits.size]
        np.bitwise_and(bits, np.uint32(0xFFFF), out=scratch)
        np.add(scratch, np.uint32(0xFFFF), out=scratch)
        np.bitwise_or(scratch, bits, out=scratch)
        np.right_shift(scratch, np.uint32(16), out=scratch)
        np.copyto(target.view(np.uint16), scratch, casting="unsafe")


class _Lookup:
    """Converts by table, 16 bits at a time: one element, or two of an 8-bit source."""

    def __init__(self, source: str, target: str, max_count: int) -> None:
        self._table = _make_table(source, target)
        # numpy would make this copy at each call, in fresh memory.
        self._index = np.empty(max_count * FLOAT_NBYTES[source] // 2, np.intp)

    def __call__(self, source: _Bytes, target: _Bytes) -> None:
        index = self._index[: source.size // 2]
        np.copyto(index, source[: 2 * index.size].view(np.uint16))
        whole_nbytes = index.size * self._table.itemsize
        # "clip" spares the check of the bounds, which cannot be exceeded.
        whole = target[:whole_nbytes].view(self._table.dtype)
        np.take(self._table, index, mode="clip", out=whole)
        if source.size % 2:
            # The last of an odd number of 8-bit elements: first of the pair it makes with zero.
            pair = self._table[int(source[-1]) :][:1].view(np.uint8)
            target[whole_nbytes:] = pair[: self._table.itemsize // 2]


@functools.cache
def _make_table(source: str, target: str) -> npt.NDArray[np.void]:
    """Make the table from each 16-bit pattern to the bytes of its one or two target elements."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = patterns.view(_NUMPY_DTYPES[source]).astype(np.float32)
        results = (
            _round_to_e8m0(values) if target == "F8_E8M0" else values.astype(_NUMPY_DTYPES[target])
        )
    entry_nbytes = FLOAT_NBYTES[target] * 2 // FLOAT_NBYTES[source]
    table: npt.NDArray[np.void] = results.view(f"V{entry_nbytes}")
    table.setflags(write=False)
    return table


def _round_to_e8m0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round to powers of two as torch does, where ml_dtypes gives NaN for zero and negatives.

    The sign is dropped, a mantissa of a half rounds up, and only what is subnormal in float32
    rounds a half down. Zero becomes 2**-127, infinity NaN.
    """
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    half = np.where(bits < 0x800000, np.uint32(0x3FFFFF), np.uint32(0x400000))
    return np.minimum((bits + half) >> np.uint32(23), 0xFF).astype(np.uint8)
