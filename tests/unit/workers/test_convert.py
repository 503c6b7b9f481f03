"""Every conversion gives the bits that torch gives, for every pattern of small dtypes."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.workers.convert import FLOAT_NBYTES, make_converter

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
RARE = {
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
ALL = TORCH | RARE
SMALL = [name for name, dtype in TORCH.items() if dtype.itemsize <= 2]
PAIRS = [(source, target) for source in TORCH for target in TORCH]


def patterns_of(dtype):
    """All bit patterns of an 8- or 16-bit dtype."""
    nbytes = FLOAT_NBYTES[dtype]
    return np.arange(1 << (8 * nbytes), dtype=f"u{nbytes}")


def by_torch(patterns, source, target):
    values = torch.frombuffer(bytearray(patterns.tobytes()), dtype=ALL[source])
    return values.to(ALL[target]).view(torch.uint8).numpy().view(f"u{FLOAT_NBYTES[target]}")


def by_converter(patterns, source, target):
    written = bytearray(patterns.size * FLOAT_NBYTES[target])
    convert = make_converter(source, target, patterns.size)
    convert(memoryview(patterns.tobytes()), memoryview(written), patterns.size)
    return np.frombuffer(written, f"u{FLOAT_NBYTES[target]}")


def values_of(patterns, dtype):
    """The values of patterns in float64, which represents all of them exactly."""
    return by_torch(patterns, dtype, "F64").view(np.float64)


def assert_same(patterns, source, target):
    expected = by_torch(patterns, source, target)
    got = by_converter(patterns, source, target)
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, [
        f"{patterns[i]:#x} -> {got[i]:#x}, torch {expected[i]:#x}" for i in wrong[:5]
    ]


@pytest.mark.parametrize("target", TORCH)
@pytest.mark.parametrize("source", SMALL)
def test_every_pattern_of_8_and_16_bits_gives_torchs_bits(source, target):
    assert_same(patterns_of(source), source, target)


@pytest.mark.parametrize("rare", RARE)
@pytest.mark.parametrize("other", ALL)
def test_every_pattern_of_rare_dtypes_gives_torchs_bits(rare, other):
    assert_same(patterns_of(rare), rare, other)
    if FLOAT_NBYTES[other] <= 2:
        assert_same(patterns_of(other), other, rare)


def float32_near_boundaries(target):
    """Each number of the target, each halfway point and each overflow edge, with neighbours."""
    values = values_of(patterns_of(target), target)
    values = np.unique(values[np.isfinite(values)])
    edges = values[-1] + (values[-1] - values[-2]) * np.array([0.5, 1, 1.5, 2])
    with np.errstate(over="ignore"):
        # The edges of BF16 are out of range for float32, which makes them infinite.
        values = np.unique(np.concatenate([values, edges, -edges]).astype(np.float32))
    values = values[np.isfinite(values)].astype(np.float64)
    halves = (values[1:] + values[:-1]) / 2
    near = np.concatenate([values, halves]).astype(np.float32).view(np.uint32)
    special = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF]
    near = np.concatenate([near + np.uint32(k) for k in range(3)] + [near - 1, near - 2])
    infinities = [0x7F800000, 0xFF800000]
    return np.unique(np.concatenate([near, np.array(special + infinities, np.uint32)]))


@pytest.mark.parametrize("target", SMALL)
def test_float32_rounds_as_torch_at_every_boundary(target):
    patterns = float32_near_boundaries(target)
    assert_same(patterns, "F32", target)


@pytest.mark.parametrize("target", SMALL)
def test_float64_is_rounded_to_float32_first(target):
    values = values_of(patterns_of(target), target)
    values = np.unique(values[np.isfinite(values)])
    halves = (values[1:] + values[:-1]) / 2
    # So near a half that float32 rounds to the half itself, which then rounds to even.
    near = np.concatenate([halves, halves * (1 + 2.0**-40), halves * (1 - 2.0**-40)])
    near = np.concatenate([near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)])
    assert_same(near.view(np.uint64), "F64", target)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_subnormals_stay_in_a_thread_that_flushes_them(source, target):
    nbytes = FLOAT_NBYTES[source]
    patterns = np.arange(1 << 8 * min(nbytes, 2), dtype=f"u{nbytes}") << 8 * max(0, nbytes - 2)
    patterns = patterns[np.abs(values_of(patterns, source)) < 1]  # no NaN, which torch converts
    expected = by_torch(patterns, source, target)
    is_flushing = torch.set_flush_denormal(True)
    try:
        got = by_converter(patterns, source, target)
        assert (sys.float_info.min / 2 == 0) == is_flushing
    finally:
        torch.set_flush_denormal(False)
    assert got.tolist() == expected.tolist()


@st.composite
def conversions(draw):
    source, target = draw(st.sampled_from(PAIRS))
    nbytes = FLOAT_NBYTES[source]
    content = draw(st.binary(min_size=nbytes, max_size=70 * nbytes))
    return np.frombuffer(content[: len(content) // nbytes * nbytes], f"u{nbytes}"), source, target


@given(conversions())
@settings(deadline=None, max_examples=1000)
def test_any_bits_give_torchs_bits(conversion):
    assert_same(*conversion)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_only_count_elements_are_written(source, target):
    patterns = by_torch(np.ones(8, np.float32).view(np.uint32), "F32", source)
    read, expected = memoryview(patterns.tobytes()), by_torch(patterns, source, target).tobytes()
    convert = make_converter(source, target, 8)
    for count in (0, 1, 2, 7):
        written = bytearray(b"\xab" * len(expected))
        convert(read, memoryview(written), count)
        end = count * FLOAT_NBYTES[target]
        assert written == expected[:end] + b"\xab" * (len(written) - end)
