"""Kernels: each converts tiles of one floating dtype to another.

torch converts every pair through float32, double rounding included, and so do the kernels:

    F64 -> F32                     numpy
    F32 -> F64, BF16               numpy, ml_dtypes
    F32 -> F16, F8_E4M3, F8_E5M2   arithmetic on the bits (`_RoundToSmall`)
    F32 -> other 8 bits            to 16 bits, then a table (`_RoundToOdd`, `_Lookup`)
    BF16, F16 -> F32               ml_dtypes, scaling (`_WidenFloat16`)
    BF16, F16 -> 16 or 8 bits      a table of all patterns (`_Lookup`)
    8 bits -> any                  a table of all pairs of patterns (`_Lookup`)
"""

import functools
from typing import Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

NUMPY_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
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

FLOAT_NBYTES: Final[dict[str, int]] = {name: d.itemsize for name, d in NUMPY_DTYPES.items()}
"""Size of an element in bytes, by the safetensors name of each dtype that kernels convert."""

# The lowest positive bit pattern that is NaN. All patterns above it are NaN too, with or without
# the sign bit.
_FIRST_NAN: Final[dict[str, int]] = {
    "F16": 0x7C01,
    "BF16": 0x7F81,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7D,
}

Bytes = npt.NDArray[np.uint8]


class Kernel(Protocol):
    """Converts tiles of at most as many elements as it was made for."""

    def __call__(self, source: Bytes, target: Bytes) -> bool:
        """Convert a tile; return whether the result holds a NaN, whose bits torch must decide."""


def choose_kernel(source: str, target: str, max_count: int) -> Kernel:
    """Make the fastest kernel for two different dtypes."""
    source_nbytes, target_nbytes = FLOAT_NBYTES[source], FLOAT_NBYTES[target]
    if source_nbytes == 1 or (source_nbytes == 2 and target_nbytes <= 2):
        return _Lookup(source, target, max_count)
    if "F32" not in (source, target):
        return _ThroughFloat32(source, target, max_count)
    if source == "F16":
        return _WidenFloat16()
    if target in ("F16", "F8_E4M3", "F8_E5M2"):
        return _RoundToSmall(target, max_count)
    if target_nbytes == 1:
        return _RoundToOdd(target, max_count)
    return _Cast(source, target)


class _ThroughFloat32:
    """Two kernels with a tile of F32 between them."""

    def __init__(self, source: str, target: str, max_count: int) -> None:
        self._widen = choose_kernel(source, "F32", max_count)
        self._narrow = choose_kernel("F32", target, max_count)
        self._source_nbytes = FLOAT_NBYTES[source]
        self._middle = np.empty(max_count * 4, np.uint8)

    def __call__(self, source: Bytes, target: Bytes) -> bool:
        middle = self._middle[: source.size // self._source_nbytes * 4]
        return self._widen(source, middle) or self._narrow(middle, target)


class _Cast:
    """numpy's and ml_dtypes' own conversion; fast only for the pairs that no other kernel takes."""

    def __init__(self, source: str, target: str) -> None:
        self._source = source
        self._target = target

    def __call__(self, source: Bytes, target: Bytes) -> bool:
        values = source.view(NUMPY_DTYPES[self._source])
        np.copyto(target.view(NUMPY_DTYPES[self._target]), values, casting="unsafe")
        return _has_nan(target, self._target)


class _WidenFloat16:
    """F16 -> F32: the bits, moved to their places, are a float32 that is 2**-112 of the value."""

    _SCALE: Final = np.float32(2.0**112)

    def __init__(self) -> None:
        self._cast = _Cast("F16", "F32")

    def __call__(self, source: Bytes, target: Bytes) -> bool:
        # Infinity and NaN have an exponent that does not scale.
        if _greatest_magnitude(source, "F16") >= 0x7C00:
            return self._cast(source, target)
        bits = target.view(np.int32)
        np.copyto(bits, source.view(np.int16))
        np.left_shift(bits, 13, out=bits)
        # The copy extended the sign to bits 28 to 31; keep only bit 31.
        np.bitwise_and(bits, ~0x70000000, out=bits)
        values = target.view(np.float32)
        np.multiply(values, self._SCALE, out=values)
        return False


class _RoundToSmall:
    """F32 -> F16, F8_E4M3 or F8_E5M2, by letting one float32 addition do the rounding.

    Let x be the absolute value, 2**e its power of two (but no lower than that of the target's
    smallest normal number) and `dropped` the number of mantissa bits the target lacks. The sum
    x + 2**(e + dropped) has no place for just those bits, so the processor rounds them away, to
    nearest and ties to even, also where the target is subnormal. The mantissa of the sum is then
    x in units of the target's last place, and its exponent is e and a constant: the pattern wanted
    is this mantissa plus e in the place of the target's exponent. One wrapping multiplication adds
    them in the topmost bits; `excess`, what the constants come to, is taken from the mantissa
    beforehand. All patterns of F32 give what torch 2.13 gives (compared 2026-11).
    """

    # For each target: mantissa bits, exponent of the smallest normal number, greatest number.
    _LIMITS: Final[dict[str, tuple[int, int, float]]] = {
        "F16": (10, -14, 65504.0),
        "F8_E4M3": (3, -6, 448.0),
        "F8_E5M2": (2, -14, 57344.0),
    }

    def __init__(self, target: str, max_count: int) -> None:
        mantissa_nbits, least_exponent, greatest = self._LIMITS[target]
        dropped = 23 - mantissa_nbits
        nbits = 8 * FLOAT_NBYTES[target]
        # 127 is the bias of a float32's exponent, 23 its place.
        least_exponent += 127
        excess = (least_exponent + dropped) << mantissa_nbits
        self._step = (dropped << 23) + (-excess) % (1 << nbits)
        self._factor = (1 << (32 - nbits)) + (1 << (32 - nbits - dropped))
        self._shift = 32 - nbits
        # An array, because with a scalar numpy's maximum takes a loop three times as slow.
        self._floor = np.full(max_count, least_exponent << 23, np.uint32)
        self._sum = np.empty(max_count, np.uint32)
        self._power = np.empty(max_count, np.uint32)
        self._greatest = int(np.float32(greatest).view(np.uint32))
        self._cast = _Cast("F32", target)
        self._pattern = f"u{FLOAT_NBYTES[target]}"

    def __call__(self, source: Bytes, target: Bytes) -> bool:
        bits = source.view(np.uint32)
        total, power = self._sum[: bits.size], self._power[: bits.size]
        np.bitwise_and(bits, 0x7FFFFFFF, out=total)
        if int(np.maximum.reduce(total)) > self._greatest:
            # Overflow, infinity and NaN: rare, and the slow kernel gets them right.
            return self._cast(source, target)
        np.bitwise_and(bits, 0x7F800000, out=power)
        np.maximum(power, self._floor[: bits.size], out=power)
        np.add(power, self._step, out=power)
        values = total.view(np.float32)
        np.add(values, power.view(np.float32), out=values)
        np.multiply(total, self._factor, out=total)
        sign = np.bitwise_and(bits, 0x80000000, out=power)
        np.bitwise_or(total, sign, out=total)
        np.right_shift(total, self._shift, out=total)
        np.copyto(target.view(self._pattern), total, casting="unsafe")
        return False


class _RoundToOdd:
    """F32 -> 8 bits: keep the upper 16 bits, and set the last of them if any lower bit was set.

    The 16 bits are looked up as BF16. Rounding them to nearest gives the same as rounding all 32,
    because at least two bits are dropped: no 8-bit dtype has more than 4 of BF16's 8.
    """

    def __init__(self, target: str, max_count: int) -> None:
        self._lookup = _Lookup("BF16", target, max_count)
        self._scratch = np.empty(max_count, np.uint32)
        self._upper = np.empty(max_count, np.uint16)

    def __call__(self, source: Bytes, target: Bytes) -> bool:
        bits = source.view(np.uint32)
        scratch, upper = self._scratch[: bits.size], self._upper[: bits.size]
        np.bitwise_and(bits, 0xFFFF, out=scratch)
        np.add(scratch, 0xFFFF, out=scratch)
        np.bitwise_or(scratch, bits, out=scratch)
        np.right_shift(scratch, 16, out=scratch)
        np.copyto(upper, scratch, casting="unsafe")
        return self._lookup(upper.view(np.uint8), target)


class _Lookup:
    """Converts by table, 16 bits at a time: one element, or two of an 8-bit source."""

    def __init__(self, source: str, target: str, max_count: int) -> None:
        self._target = target
        self._table = _make_table(source, target)
        # Indexes of the type that numpy wants: else it would copy them to fresh memory each time.
        self._index = np.empty(max_count * FLOAT_NBYTES[source] // 2, np.intp)

    def __call__(self, source: Bytes, target: Bytes) -> bool:
        index = self._index[: source.size // 2]
        np.copyto(index, source[: 2 * index.size].view(np.uint16))
        whole_nbytes = index.size * self._table.itemsize
        # "clip" skips the check of bounds; every 16-bit pattern is in the table.
        whole = target[:whole_nbytes].view(self._table.dtype)
        np.take(self._table, index, mode="clip", out=whole)
        if source.size % 2:
            # An odd last 8-bit element: look it up as a pair with zero, take the first of two.
            pair = self._table[int(source[-1]) :][:1].view(np.uint8)
            target[whole_nbytes:] = pair[: self._table.itemsize // 2]
        return _has_nan(target, self._target)


@functools.cache
def _make_table(source: str, target: str) -> npt.NDArray[np.void]:
    """Make the table from each 16-bit pattern to the bytes of its one or two target elements."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = patterns.view(NUMPY_DTYPES[source]).astype(np.float32)
        results = (
            _round_to_e8m0(values) if target == "F8_E8M0" else values.astype(NUMPY_DTYPES[target])
        )
    entry_nbytes = FLOAT_NBYTES[target] * 2 // FLOAT_NBYTES[source]
    table: npt.NDArray[np.void] = results.view(f"V{entry_nbytes}")
    table.setflags(write=False)
    return table


def _round_to_e8m0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round to powers of two as torch does, where ml_dtypes gives NaN for zero and negatives.

    The sign is dropped. A mantissa of a half rounds up, but down if the number is subnormal in
    float32. Zero becomes 2**-127, infinity NaN.
    """
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    half = np.where(bits < 0x800000, np.uint32(0x3FFFFF), np.uint32(0x400000))
    exponents: npt.NDArray[np.uint32] = (bits + half) >> np.uint32(23)
    return np.minimum(exponents, 0xFF).astype(np.uint8)


def _has_nan(tile: Bytes, dtype: str) -> bool:
    """Tell whether a tile holds a NaN; takes about 5 us, where most conversions take 30 to 80."""
    if dtype in ("F64", "F32"):
        # The maximum is NaN if any element is.
        return bool(np.isnan(np.maximum.reduce(tile.view(NUMPY_DTYPES[dtype]))))
    if dtype == "F8_E8M0":
        return int(np.maximum.reduce(tile)) == 0xFF
    if dtype in ("F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        return int(np.minimum.reduce(tile.view(np.int8))) == -0x80
    return _greatest_magnitude(tile, dtype) >= _FIRST_NAN[dtype]


def _greatest_magnitude(tile: Bytes, dtype: str) -> int:
    """Return the greatest pattern in a tile, without sign bits; the dtype is in `_FIRST_NAN`."""
    nbytes = FLOAT_NBYTES[dtype]
    # Read as signed, a positive number has the greatest pattern; as unsigned, a negative one.
    positive = int(np.maximum.reduce(tile.view(f"i{nbytes}")))
    negative = int(np.maximum.reduce(tile.view(f"u{nbytes}"))) - (1 << (8 * nbytes - 1))
    return max(positive, negative)
