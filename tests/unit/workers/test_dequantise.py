"""Blocks of every kind are dequantised to the bits of the gguf package and torch's cast."""

import pytest
import torch
from gguf_files import content, dequantised, random_blocks
from memory_files import in_memory

from shmload._checkpoints.dtypes import BLOCKS, parse_dtype
from shmload._checkpoints.formats.gguf import read_header
from shmload._checkpoints.quantised import require_dequantised
from shmload._checkpoints.rule import RAW, Rule
from shmload.errors import CheckpointError
from shmload.workers.convert import make_converter

UNKNOWN = {"Q8_1", "Q8_K", "Q1_0"}
DEQUANTISED = sorted(BLOCKS.keys() - UNKNOWN)
_SHAPE = (5, 512)


def convert(kind, blocks, dtype):
    target = bytearray(_SHAPE[0] * _SHAPE[1] * dtype.itemsize)
    count = blocks.size // BLOCKS[kind][1]
    make_converter(kind, parse_dtype(dtype), 0)(blocks.data.cast("B"), memoryview(target), count)
    return torch.frombuffer(target, dtype=dtype).view(_SHAPE)


def assert_same_bits(got, wanted):
    assert got.dtype == wanted.dtype
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", DEQUANTISED)
def test_bits_are_those_of_the_package(kind, dtype):
    blocks = random_blocks(kind, _SHAPE)
    assert_same_bits(convert(kind, blocks, dtype), dequantised(kind, blocks, dtype))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "IQ4_XS"])
def test_infinities_and_nans_are_where_the_package_has_them(kind):
    blocks = random_blocks(kind, _SHAPE)
    blocks[1, :2], blocks[2, :2] = (0x00, 0x7C), (0x01, 0x7E)  # the scale of a first block
    got, wanted = convert(kind, blocks, torch.float32), dequantised(kind, blocks, torch.float32)
    assert wanted.isinf().any()
    assert wanted.isnan().any()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("kind", sorted(UNKNOWN))
def test_kind_that_the_package_does_not_dequantise_is_named(kind):
    tensors = {"a.weight": (kind, (256,), bytes(256 // BLOCKS[kind][0] * BLOCKS[kind][1]))}
    with in_memory(content(tensors)) as fd:
        header = read_header(fd, "a.gguf")
    require_dequantised("a.gguf", header.tensors, RAW)
    with pytest.raises(CheckpointError, match=f"'a.weight' has the kind {kind}"):
        require_dequantised("a.gguf", header.tensors, Rule(target="BF16"))
