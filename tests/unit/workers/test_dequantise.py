"""Blocks of every kind are dequantised to the bits of the gguf package and torch's cast."""

import os

import pytest
import torch
from gguf_files import content, dequantised, random_blocks

from shmload._checkpoints.dtypes import BLOCKS, TORCH_NAMES, parse_dtype
from shmload._checkpoints.formats.gguf import read_header
from shmload._checkpoints.formats.safetensors import read_header as read_segment
from shmload._checkpoints.quantised import require_dequantised
from shmload._checkpoints.rule import RAW, Rule
from shmload._host.reading import Reading
from shmload._segments.layout import lay_out
from shmload._segments.metadata import make_metadata
from shmload.errors import CheckpointError
from shmload.workers.convert import make_converter
from shmload.workers.fill import Filler

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


def fill(raw, target, piece_nbytes=2048):
    """Make a segment's bytes from those of a file."""
    source, part = os.memfd_create("source"), os.memfd_create("part")
    try:
        os.write(source, raw)
        header = read_header(source, "a.gguf")
        rule = Rule(target=target)
        layout = lay_out(header, rule, make_metadata("a.gguf", "", rule.text), piece_nbytes)
        os.ftruncate(part, layout.nbytes)
        os.pwrite(part, layout.header, 0)
        filler = Filler()
        read = []
        for piece in layout.pieces:
            filler.fill(Reading(source), part, piece, read.append)
        assert sum(read) == header.data_nbytes
        found = read_segment(part, "segment")
        return {
            spec.name: (spec, os.pread(part, spec.nbytes, found.data_offset + spec.begin))
            for spec in found.tensors
        }
    finally:
        os.close(source)
        os.close(part)


@pytest.mark.parametrize("target", [None, "BF16", "F32", "F64", "F8_E5M2"])
def test_segment_of_many_kinds_has_no_block_in_two_pieces(target):
    kinds = ["Q4_0", "F32", "Q6_K", "F16", "BF16", "IQ4_NL", "Q8_0", "NVFP4", "Q4_K", "I32"]
    tensors, wanted = {}, {}
    for seed, kind in enumerate(kinds * 2):
        shape, name = (1 + seed % 3, 256 * (1 + seed % 5)), f"{seed}.{kind}"
        if kind in BLOCKS:
            blocks = random_blocks(kind, shape, seed)
            blocks &= 0x1F
            tensors[name] = (kind, shape, blocks.tobytes())
            wanted[name] = (kind, blocks)
        else:
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            values = values.to(getattr(torch, TORCH_NAMES[kind]))
            tensors[name] = (kind, shape, values.view(torch.uint8).numpy().tobytes())
            wanted[name] = (kind, values)
    filled = fill(content(tensors), target)
    assert filled.keys() == tensors.keys()
    for name, (spec, raw) in filled.items():
        kind, values = wanted[name]
        if kind in BLOCKS and target is None:
            assert (spec.dtype, spec.shape) == ("U8", values.shape)
            assert raw == values.tobytes()
            continue
        dtype = getattr(torch, TORCH_NAMES[target if target and kind != "I32" else kind])
        if kind in BLOCKS:
            values = dequantised(kind, values, dtype)
        assert spec.shape == values.shape
        got = torch.frombuffer(bytearray(raw), dtype=dtype).view(spec.shape)
        assert_same_bits(got, values.to(dtype))


@pytest.mark.parametrize("kind", sorted(UNKNOWN))
def test_kind_that_the_package_does_not_dequantise_is_named(kind):
    tensors = {"a.weight": (kind, (256,), bytes(256 // BLOCKS[kind][0] * BLOCKS[kind][1]))}
    fd = os.memfd_create("source")
    try:
        os.write(fd, content(tensors))
        header = read_header(fd, "a.gguf")
    finally:
        os.close(fd)
    require_dequantised("a.gguf", header.tensors, RAW)
    with pytest.raises(CheckpointError, match=f"'a.weight' has the kind {kind}"):
        require_dequantised("a.gguf", header.tensors, Rule(target="BF16"))
