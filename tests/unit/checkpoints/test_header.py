"""The header parser accepts every safetensors file and refuses each bad header with one error."""

import json
import os

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_files import in_memory

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.formats.safetensors import parse_header, read_header
from shmload.errors import ShardMalformed, ShardTruncated, ShmloadError

_DTYPES = sorted(name for name in TORCH_NAMES if NBITS[name] >= 8)
_names = st.text(max_size=20).filter(lambda name: name != "__metadata__")
_shapes = st.lists(st.integers(0, 4), max_size=4)
_tensors = st.dictionaries(_names, st.tuples(st.sampled_from(_DTYPES), _shapes), max_size=6)
# Not empty: without tensors and metadata safetensors 0.8 writes a file that it cannot read.
_metadata = st.none() | st.dictionaries(
    st.text(max_size=8), st.text(max_size=8), min_size=1, max_size=3
)


def serialize(tensors, metadata=None):
    """Serialize with safetensors; each tensor is filled with its number."""
    given = {}
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        kind = getattr(torch, TORCH_NAMES[dtype])
        given[name] = torch.empty(shape, dtype=kind)
        given[name].view(-1).view(torch.uint8).fill_(number)
    return safetensors.torch.save(given, metadata)


def read(content):
    with in_memory(content) as fd:
        return read_header(fd, "model.safetensors")


def make_file(header, data=b""):
    """Put a header in front of data; it is JSON text, or a value to serialize."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(**changes):
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes


@pytest.mark.slow
@given(_tensors, _metadata)
def test_what_safetensors_writes_is_read(tensors, metadata):
    content = serialize(tensors, metadata)
    header = read(content)
    assert {spec.name: (spec.dtype, list(spec.shape)) for spec in header.tensors} == tensors
    assert (header.metadata or {}) == (metadata or {})
    assert header.data_offset + header.data_nbytes == len(content)
    for number, name in enumerate(tensors):
        spec = next(spec for spec in header.tensors if spec.name == name)
        found = content[header.data_offset + spec.begin : header.data_offset + spec.end]
        assert found == bytes([number]) * spec.nbytes


_SAMPLE = serialize(
    {"a.weight": ("F32", [2, 3]), "b": ("BF16", [4]), "empty": ("U8", [0]), "one": ("I64", [])},
    {"format": "pt"},
)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(_SAMPLE) - 1), st.integers(0, 255)), max_size=3))
def test_flipped_bytes_are_refused_or_read_as_safetensors_does(flips):
    content = bytearray(_SAMPLE)
    for place, value in flips:
        content[place] = value
    try:
        header = read(bytes(content))
    except ShmloadError:
        return
    found = dict(safetensors.deserialize(bytes(content)))
    assert {spec.name: list(spec.shape) for spec in header.tensors} == {
        name: list(tensor["shape"]) for name, tensor in found.items()
    }


@given(st.integers(0, len(_SAMPLE) - 1))
def test_every_cut_is_refused(length):
    with pytest.raises((ShardTruncated, ShardMalformed), match=r"model\.safetensors"):
        read(_SAMPLE[:length])


@given(st.binary(max_size=200))
def test_rubbish_is_refused(raw):
    with pytest.raises(ShardMalformed):
        parse_header(b"{" + raw, "model.safetensors")


def test_cut_data_is_truncated_and_says_by_how_much():
    with pytest.raises(ShardTruncated) as caught:
        read(_SAMPLE[:-5])
    assert (caught.value.wanted, caught.value.got) == (len(_SAMPLE), len(_SAMPLE) - 5)


_DEEP = 200_000
MALFORMED = {
    "length of 2**63": (2**63).to_bytes(8, "little") + b"{}",
    "length above the limit": (100_000_001).to_bytes(8, "little") + b"{}",
    "no object": make_file(b"[]"),
    "nothing": make_file(b""),
    "space in front": make_file(b" {}"),
    "rubbish behind": make_file(b"{} x"),
    "not UTF-8": make_file(b'{"\xff":' + json.dumps(entry()).encode() + b"}", b"1234"),
    "half a surrogate": make_file(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", b"1234"),
    "an open object": make_file(b'{"a":'),
    "deep arrays": make_file(b'{"a":' + b"[" * _DEEP),
    "deep metadata": make_file(b'{"__metadata__":' + b"[" * _DEEP + b"]" * _DEEP + b"}"),
    "deep shape": make_file({"a": 0}).replace(b"0}", b'{"shape":' + b"[" * _DEEP),
    "trailing bytes": make_file({"a": entry()}, b"12345"),
    "trailing bytes and no tensor": make_file({}, b"1"),
    "overlap": make_file(
        {"a": entry(), "b": entry(data_offsets=[2, 6])},
        b"123456",
    ),
    "same bytes twice": make_file({"a": entry(), "b": entry()}, b"1234"),
    "hole": make_file({"a": entry(), "b": entry(data_offsets=[5, 9])}, b"123456789"),
    "offsets the wrong way": make_file({"a": entry(data_offsets=[4, 0])}, b"1234"),
    "negative offset": make_file({"a": entry(data_offsets=[-4, 0])}, b"1234"),
    "offset of 2**63": make_file({"a": entry(data_offsets=[0, 2**63])}, b"1234"),
    "offset of 2**64": make_file({"a": entry(data_offsets=[0, 2**64])}, b"1234"),
    "three offsets": make_file({"a": entry(data_offsets=[0, 4, 4])}, b"1234"),
    "offset as text": make_file({"a": entry(data_offsets=["0", "4"])}, b"1234"),
    "shape that overflows": make_file({"a": entry(shape=[2**32, 2**32, 4])}, b"1234"),
    "shape that wraps around to the size": make_file({"a": entry(shape=[2**62 + 1, 4])}, b"1234"),
    "shape that overflows and has no elements": make_file(
        {"a": entry(shape=[2**31, 2**32, 0], data_offsets=[0, 0])}
    ),
    "shape of the wrong size": make_file({"a": entry(shape=[5])}, b"1234"),
    "negative size": make_file({"a": entry(shape=[-4])}, b"1234"),
    "fraction as size": make_file({"a": entry(shape=[4.0])}, b"1234"),
    "true as size": make_file({"a": entry(shape=[True, 4])}, b"1234"),
    "null as shape": make_file({"a": entry(shape=None)}, b"1234"),
    "too many dimensions": make_file({"a": entry(shape=[1] * 65 + [4])}, b"1234"),
    "digits without end": make_file(b'{"__metadata__":{"a":' + b"9" * 10_000 + b"}}"),
    "unknown dtype": make_file({"a": entry(dtype="F7")}, b"1234"),
    "dtype as number": make_file({"a": entry(dtype=8)}, b"1234"),
    "half a byte": make_file({"a": entry(dtype="F4", shape=[1], data_offsets=[0, 1])}, b"1"),
    "no dtype": make_file({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "a field too many": make_file({"a": entry(extra=1)}, b"1234"),
    "tensor as null": make_file({"a": None}),
    "metadata as list": make_file({"__metadata__": []}),
    "metadata with a number": make_file({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_lying_header_is_malformed(kind):
    with pytest.raises(ShardMalformed, match=r"^model\.safetensors is not a valid") as caught:
        read(MALFORMED[kind])
    assert "download it again" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_huge_length_takes_no_memory(monkeypatch):
    monkeypatch.setattr(os, "pread", _forbid_large(os.pread))
    with pytest.raises(ShardMalformed, match="claim a header of 9223372036854775808 bytes"):
        read(MALFORMED["length of 2**63"])
    with pytest.raises(ShardTruncated):
        read((99_999_999).to_bytes(8, "little") + b"{}")


def _forbid_large(pread):
    def read_little(fd, nbytes, offset):
        assert nbytes < 1000
        return pread(fd, nbytes, offset)

    return read_little
