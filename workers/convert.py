"""Converts floating dtypes to the bits that `torch.Tensor.to(dtype)` gives, without torch.

Quantised blocks too: their format's package makes float32 of any number of whole blocks. So a
worker calls it for as many blocks as its cache holds, and casts the result while it is there.

Importing torch costs a worker seconds and hundreds of MiB, so numpy and ml_dtypes do the
arithmetic. They cannot know which NaN torch writes: that depends on the vector instructions that
torch's build uses on this CPU. If a block's result holds a NaN, torch is imported and converts the
block again. Other blocks never need torch.

torch converts every pair through float32, double rounding included, and so do the kernels:

    F64 -> F32                     numpy
    F32 -> F64, BF16               numpy, ml_dtypes
    F32 -> F16, F8_E4M3, F8_E5M2   arithmetic on the bits (`_rounding_to_small`)
    BF16, F16 -> F32               ml_dtypes, scaling (`_widen_float16`)
    BF16, F16 -> 16 or 8 bits      a table of all patterns (`_looking_up`)
    8 bits -> any                  a table of all pairs of patterns (`_looking_up`)

Pairs with one of the three other dtypes of 8 bits (FNUZ, E8M0) are rare: torch converts them all.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shmload._checkpoints.dtypes import BLOCKS, FLOATS, NBITS, TORCH_NAMES

# Elements converted at a time; even, because 8-bit sources are read in pairs. A scratch array of
# 4-byte elements is then 256 KiB, of which several fit the level-2 cache, and numpy's cost per call
# is spread thin. Measured on an EPYC 9004 with 1 MiB of level 2, F32 -> F16, 2026-11: 8 Ki elements
# 0.51 Gelem/s, 16 Ki 0.75, 32 Ki 0.91, 64 Ki 1.00, 128 Ki 1.04.
_TILE_COUNT: Final = 1 << 16
# Elements dequantised at a time. Measured on one core, 3072 x 3072 elements of Q4_K to bf16,
# 2026-11: 16 Ki 0.049 s, 32 Ki 0.035, 64 Ki 0.029, 128 Ki 0.029.
_BLOCKS_COUNT: Final = 1 << 16
_C_LIBRARY: Final = ctypes.PyDLL(None)  # keeps the interpreter lock: a call takes 0.2 us
# FE_DFL_ENV of fenv.h: round to nearest, keep subnormals. A `fenv_t` takes 8 to 32 bytes.
_DEFAULT_ENVIRONMENT: Final = ctypes.c_void_p(-1)
_ENVIRONMENT_NBYTES: Final = 64
# glibc gives arrays back to the kernel, and takes new pages for the next ones, until it has once
# freed an array as large as this. 733 MB of Q4_K to bf16 took 3.2 million page faults without that,
# and take 7 thousand.
_HEAP_NBYTES: Final = 8 << 20

NUMPY_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}

FLOAT_NBYTES: Final[dict[str, int]] = {name: NBITS[name] // 8 for name in FLOATS}
"""Size of an element in bytes, by the safetensors name of each dtype that is converted."""

# The lowest positive bit pattern that is NaN. All patterns above it are NaN too, with or without
# the sign bit.
_FIRST_NAN: Final[dict[str, int]] = {
    "F16": 0x7C01,
    "BF16": 0x7F81,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7D,
}

Bytes = npt.NDArray[np.uint8]


Converter = Callable[[memoryview, memoryview, int], None]
"""Converts so many elements, or blocks, from the front of a buffer to the front of another.

The first buffer is C-contiguous and aligned to its dtype, and may be read-only; the second does not
overlap it. No reference to one remains. It owns its scratch memory (1.2 MiB at most), so one is not
for several threads. The first elements of a process whose result holds a NaN, or overflows F8_E4M3,
import torch, which takes seconds.
"""


def make_converter(source: str, target: str, max_count: int) -> Converter:
    """Return what converts one dtype to another, as `torch.Tensor.to` does.

    Args:
        source: the dtype that is read: safetensors name of a float, or ggml's of a kind in
            `BLOCKS`.
        target: safetensors name of the float that is written.
        max_count: the most elements that one call may be given.

    Raises:
        LibraryError: the package for blocks is not installed.
        NotImplementedError: it does not dequantise the kind.
    """
    if source in BLOCKS:
        return _dequantiser(source, target)
    source_nbytes, target_nbytes = FLOAT_NBYTES[source], FLOAT_NBYTES[target]
    kernel: Kernel = _leave_to_torch
    if {source, target} <= NUMPY_DTYPES.keys():
        kernel = choose_kernel(source, target, min(max_count, _TILE_COUNT))

    def convert(given: memoryview, made: memoryview, count: int) -> None:
        read = np.frombuffer(given, np.uint8, count * source_nbytes)
        written = np.frombuffer(made, np.uint8, count * target_nbytes)
        with _usual_arithmetic():
            for start in range(0, count, _TILE_COUNT):
                stop = start + _TILE_COUNT
                tile = written[start * target_nbytes : stop * target_nbytes]
                if kernel(read[start * source_nbytes : stop * source_nbytes], tile):
                    # All of them: where in a vector a NaN lies can decide its bits.
                    _convert_with_torch(read, source, written, target)
                    return

    return convert


@contextlib.contextmanager
def _usual_arithmetic() -> Iterator[None]:
    """Convert as in a new process, whatever this thread does with floats.

    A program may flush subnormals to zero (`torch.set_flush_denormal`, libraries that were compiled
    with -ffast-math), and other processes get what it decodes.
    """
    before = ctypes.create_string_buffer(_ENVIRONMENT_NBYTES)
    _C_LIBRARY.fegetenv(before)
    _C_LIBRARY.fesetenv(_DEFAULT_ENVIRONMENT)
    try:
        # Overflow and NaN are results here, not mistakes to warn of.
        with np.errstate(all="ignore"):
            yield
    finally:
        _C_LIBRARY.fesetenv(before)


def _dequantiser(kind: str, target: str) -> Converter:
    from shmload._checkpoints.formats.known import dequantiser  # few checkpoints need it

    dequantise = dequantiser(kind, "a file of quantised weights")
    elements, nbytes = BLOCKS[kind]
    most = _BLOCKS_COUNT // elements
    target_nbytes = NBITS[target] // 8 * elements
    round_floats = make_converter("F32", target, _BLOCKS_COUNT)
    np.empty(_HEAP_NBYTES, np.uint8)

    def convert(given: memoryview, made: memoryview, count: int) -> None:
        with _usual_arithmetic():
            for first in range(0, count, most):
                tile = min(most, count - first)
                blocks = np.frombuffer(given, np.uint8, tile * nbytes, first * nbytes)
                # One row: the package divides several among calls of its own.
                floats = dequantise(blocks.reshape(1, -1)).reshape(-1).view(np.uint8).data
                round_floats(floats, made[first * target_nbytes :], tile * elements)

    return convert


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


# Kernels ------------------------------------------------------------------------------------------


Kernel = Callable[[Bytes, Bytes], bool]
"""Converts tiles of at most as many elements as it was made for: the first array to the second.

Returns whether the result holds a NaN, whose bits torch must decide.
"""


def choose_kernel(source: str, target: str, max_count: int) -> Kernel:
    """Make the fastest kernel for two dtypes."""
    if source == target:
        return _copy
    source_nbytes, target_nbytes = FLOAT_NBYTES[source], FLOAT_NBYTES[target]
    if source_nbytes == 1 or (source_nbytes == 2 and target_nbytes <= 2):
        return _looking_up(source, target, max_count)
    if "F32" not in (source, target):
        return _through_float32(source, target, max_count)
    if source == "F16":
        return _widen_float16
    if target in _SMALL:
        return _rounding_to_small(target, max_count)
    return functools.partial(_cast, source, target)


def _leave_to_torch(read: Bytes, written: Bytes) -> bool:
    return True


def _copy(read: Bytes, written: Bytes) -> bool:
    np.copyto(written, read)
    return False


def _through_float32(source: str, target: str, max_count: int) -> Kernel:
    """Make two kernels with a tile of F32 between them."""
    widen = choose_kernel(source, "F32", max_count)
    narrow = choose_kernel("F32", target, max_count)
    source_nbytes = FLOAT_NBYTES[source]
    scratch = np.empty(max_count * 4, np.uint8)

    def convert(read: Bytes, written: Bytes) -> bool:
        middle = scratch[: read.size // source_nbytes * 4]
        return widen(read, middle) or narrow(middle, written)

    return convert


def _cast(source: str, target: str, read: Bytes, written: Bytes) -> bool:
    """Use numpy's and ml_dtypes' own conversion; fast only for the pairs without another kernel."""
    values = read.view(NUMPY_DTYPES[source])
    np.copyto(written.view(NUMPY_DTYPES[target]), values, casting="unsafe")
    return _has_nan(written, target)


def _widen_float16(read: Bytes, written: Bytes) -> bool:
    """F16 -> F32: the bits, moved to their places, are a float32 that is 2**-112 of the value."""
    # Infinity and NaN have an exponent that does not scale.
    if _greatest_magnitude(read, "F16") >= 0x7C00:
        return _cast("F16", "F32", read, written)
    bits = written.view(np.int32)
    np.copyto(bits, read.view(np.int16))
    np.left_shift(bits, 13, out=bits)
    # The copy extended the sign to bits 28 to 31; keep only bit 31.
    np.bitwise_and(bits, ~0x70000000, out=bits)
    values = written.view(np.float32)
    np.multiply(values, np.float32(2.0**112), out=values)
    return False


# For each target of `_rounding_to_small`: mantissa bits, exponent of the smallest normal number,
# greatest number.
_SMALL: Final[dict[str, tuple[int, int, float]]] = {
    "F16": (10, -14, 65504.0),
    "F8_E4M3": (3, -6, 448.0),
    "F8_E5M2": (2, -14, 57344.0),
}


def _rounding_to_small(target: str, max_count: int) -> Kernel:
    """Make a kernel that lets one float32 addition do the rounding.

    Let x be the absolute value, 2**e its power of two (but no lower than that of the target's
    smallest normal number) and `dropped` the number of mantissa bits the target lacks. The sum
    x + 2**(e + dropped) has no place for just those bits, so the processor rounds them away, to
    nearest and ties to even, also where the target is subnormal. The mantissa of the sum is then
    x in units of the target's last place, and its exponent is e and a constant: the pattern wanted
    is this mantissa plus e in the place of the target's exponent. One wrapping multiplication adds
    them in the topmost bits; `excess`, what the constants come to, is taken from the mantissa
    beforehand. All patterns of F32 give what torch 2.13 gives (compared 2026-11).
    """
    mantissa_nbits, least_exponent, greatest = _SMALL[target]
    dropped = 23 - mantissa_nbits
    nbits = 8 * FLOAT_NBYTES[target]
    # 127 is the bias of a float32's exponent, 23 its place.
    least_exponent += 127
    excess = (least_exponent + dropped) << mantissa_nbits
    step = (dropped << 23) + (-excess) % (1 << nbits)
    factor = (1 << (32 - nbits)) + (1 << (32 - nbits - dropped))
    # An array, because with a scalar numpy's maximum takes a loop three times as slow.
    floors = np.full(max_count, least_exponent << 23, np.uint32)
    sums, powers = np.empty(max_count, np.uint32), np.empty(max_count, np.uint32)
    greatest_bits = int(np.float32(greatest).view(np.uint32))

    def convert(read: Bytes, written: Bytes) -> bool:
        bits = read.view(np.uint32)
        total, power = sums[: bits.size], powers[: bits.size]
        np.bitwise_and(bits, 0x7FFFFFFF, out=total)
        if int(np.maximum.reduce(total)) > greatest_bits:
            # Overflow, infinity and NaN: rare, and the slow kernel gets them right.
            return _cast("F32", target, read, written)
        np.bitwise_and(bits, 0x7F800000, out=power)
        np.maximum(power, floors[: bits.size], out=power)
        np.add(power, step, out=power)
        values = total.view(np.float32)
        np.add(values, power.view(np.float32), out=values)
        np.multiply(total, factor, out=total)
        sign = np.bitwise_and(bits, 0x80000000, out=power)
        np.bitwise_or(total, sign, out=total)
        np.right_shift(total, 32 - nbits, out=total)
        np.copyto(written.view(f"u{nbits // 8}"), total, casting="unsafe")
        return False

    return convert


def _looking_up(source: str, target: str, max_count: int) -> Kernel:
    """Make a kernel with a table for 16 bits: one element, or two of an 8-bit source."""
    table = _make_table(source, target)
    # Indexes of the type that numpy wants: else it would copy them to fresh memory each time.
    indexes = np.empty(max_count * FLOAT_NBYTES[source] // 2, np.intp)

    def convert(read: Bytes, written: Bytes) -> bool:
        index = indexes[: read.size // 2]
        np.copyto(index, read[: 2 * index.size].view(np.uint16))
        whole_nbytes = index.size * table.itemsize
        # "clip" skips the check of bounds; every 16-bit pattern is in the table.
        np.take(table, index, mode="clip", out=written[:whole_nbytes].view(table.dtype))
        if read.size % 2:
            # An odd last 8-bit element: look it up as a pair with zero, take the first of two.
            pair = table[int(read[-1]) :][:1].view(np.uint8)
            written[whole_nbytes:] = pair[: table.itemsize // 2]
        return _has_nan(written, target)

    return convert


@functools.cache
def _make_table(source: str, target: str) -> npt.NDArray[np.void]:
    """Make the table from each 16-bit pattern to the bytes of its one or two target elements."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = patterns.view(NUMPY_DTYPES[source]).astype(np.float32)
        results = values.astype(NUMPY_DTYPES[target])
    entry_nbytes = FLOAT_NBYTES[target] * 2 // FLOAT_NBYTES[source]
    table: npt.NDArray[np.void] = results.view(f"V{entry_nbytes}")
    table.setflags(write=False)
    return table


def _has_nan(tile: Bytes, dtype: str) -> bool:
    """Tell whether a tile holds a NaN; takes about 5 us, where most conversions take 30 to 80."""
    if dtype in ("F64", "F32"):
        # The maximum is NaN if any element is.
        return bool(np.isnan(np.maximum.reduce(tile.view(NUMPY_DTYPES[dtype]))))
    return _greatest_magnitude(tile, dtype) >= _FIRST_NAN[dtype]


def _greatest_magnitude(tile: Bytes, dtype: str) -> int:
    """Return the greatest pattern in a tile, without sign bits; the dtype is in `_FIRST_NAN`."""
    nbytes = FLOAT_NBYTES[dtype]
    # Read as signed, a positive number has the greatest pattern; as unsigned, a negative one.
    positive = int(np.maximum.reduce(tile.view(f"i{nbytes}")))
    negative = int(np.maximum.reduce(tile.view(f"u{nbytes}"))) - (1 << (8 * nbytes - 1))
    return max(positive, negative)
