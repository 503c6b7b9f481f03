"""Headers of GGUF files are read as the gguf package reads them, and bad ones are refused."""

import os
import random
import struct

import gguf
import numpy as np
import pytest
from gguf_files import KINDS, content, entry, front, padded, pair, random_blocks, text

from shmload._checkpoints.dtypes import BLOCKS, GGML_TYPES
from shmload._checkpoints.formats.gguf import read_header
from shmload.errors import CheckpointError, ShardMalformed, ShardTruncated

_U32, _TEXT, _LIST = 4, 8, 9
_SMALL = {"a": ("F32", (2, 3), bytes(24)), "b.weight": ("Q4_0", (64,), bytes(36))}


def read(raw):
    fd = os.memfd_create("file")
    try:
        os.write(fd, raw)
        return read_header(fd, "model.gguf")
    finally:
        os.close(fd)


def test_kinds_have_the_numbers_of_the_package():
    assert {kind.name: int(kind) for kind in gguf.GGMLQuantizationType} == {
        name: number for number, name in GGML_TYPES.items()
    }


def test_file_of_the_package_is_read_as_by_the_package(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_description("a description")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["a", "", "bcd"])
    writer.add_bool("is_it", True)
    writer.add_custom_alignment(64)
    writer.add_tensor("plain", np.arange(35, dtype=np.float32).reshape(5, 7))
    writer.add_tensor("half", np.ones((3, 2, 2), np.float16))
    writer.add_tensor("alone", np.float32([4]))
    for kind in BLOCKS:
        writer.add_tensor(f"blocks.{kind}", random_blocks(kind, (3, 512)), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read(path.read_bytes())
    wanted = gguf.GGUFReader(path).tensors
    assert [spec.name for spec in header.tensors] == [each.name for each in wanted]
    for spec, each in zip(header.tensors, wanted, strict=True):
        assert spec.dtype == each.tensor_type.name
        assert spec.shape == tuple(map(int, reversed(each.shape)))
        assert header.data_offset + spec.begin == each.data_offset
        assert spec.nbytes == each.n_bytes


@pytest.mark.parametrize("version", [2, 3])
def test_versions_that_are_read(version):
    raw = content(_SMALL)
    assert read(raw[:4] + struct.pack("<I", version) + raw[8:]) == read(raw)


def test_file_without_tensors():
    assert read(front(0)).tensors == ()


def test_tensors_may_have_gaps_between_them():
    data = padded(front(2) + entry("b", (8,), "F32", 64) + entry("a", (1,), "F32", 0))
    assert [each.begin for each in read(data + bytes(96)).tensors] == [64, 0]
    assert read(data + bytes(500)).data_nbytes == 36


def one(shape=(32,), kind="F32", offset=0, name="a", pairs=(), data=4096):
    described = front(1, len(pairs)) + b"".join(pairs) + entry(name, shape, kind, offset)
    return padded(described) + bytes(data)


def two(first, second):
    return padded(front(2) + first + second) + bytes(4096)


def at_alignment(packed, kind=_U32):
    return one(pairs=[pair("general.alignment", kind, packed)])


BAD = {
    "other magic": (front(1, magic=b"GGML") + bytes(99), "does not begin with GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IIII", 1, 0, 0, 0) + bytes(8), "version is 1.*recent"),
    "version 4": (front(0, version=4), "its version is 4.*versions 2 and 3"),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(99),
        "big-endian; convert it with `gguf-convert-endian`",
    ),
    "2**63 tensors": (front(1 << 63), "claims 9223372036854775808 tensors"),
    "2**63 keys": (front(0, 1 << 63), "and 9223372036854775808 keys"),
    "65,537 keys": (
        padded(front(0, (1 << 16) + 1), 1 << 20),
        "65537 keys; 43690 and 65536 are the most",
    ),
    "too many texts": (
        one(pairs=[pair("k", _LIST, struct.pack("<IQ", _TEXT, (1 << 22) + 1))]),
        "'k' has 4194305 texts",
    ),
    "key twice": (one(pairs=[pair("k", _U32, bytes(4))] * 2), "the key 'k' twice"),
    "value of no type": (one(pairs=[pair("k", 13, bytes(8))]), "key 'k' has the type 13"),
    "list of lists": (
        one(pairs=[pair("k", _LIST, struct.pack("<IQ", _LIST, 1) + bytes(12))]),
        "key 'k' has the type 9",
    ),
    "alignment 0": (at_alignment(bytes(4)), "general.alignment is 0"),
    "alignment 48": (at_alignment(struct.pack("<I", 48)), "general.alignment is 48"),
    "alignment as text": (at_alignment(text("32"), _TEXT), "general.alignment is no 32-bit"),
    "six dimensions": (one(shape=(1,) * 6), "has 6 dimensions; 5 are the most"),
    "2**32-1 dimensions": (
        padded(front(1) + text("a") + b"\xff" * 64),
        "has 4294967295 dimensions",
    ),
    "unknown kind": (one(kind=99), "unknown kind 99; update shmload"),
    "removed kind": (one(kind=4), "unknown kind 4"),
    "half a block": (one(shape=(2, 48), kind="Q4_0"), "not one of whole Q4_0 blocks"),
    "scalar of blocks": (one(shape=(), kind="Q4_0"), "not one of whole Q4_0 blocks"),
    "huge empty": (one(shape=(0, 1 << 63)), "of shape"),
    "not aligned": (one(offset=8), "begins at 8, no multiple of 32"),
    "name is no UTF-8": (one(name=b"a\xff"), "is no UTF-8"),
    "name of metadata": (one(name="__metadata__"), "tensor named __metadata__"),
    "name twice": (
        two(entry("a", (8,), "F32", 0), entry("a", (8,), "F32", 32)),
        "the tensor 'a' twice",
    ),
    "overlap": (
        two(entry("a", (16,), "F32", 0), entry("b", (8,), "F32", 32)),
        "'b' overlaps the one before it",
    ),
    "same bytes": (
        two(entry("a", (8,), "F32", 0), entry("b", (8,), "F32", 0)),
        "overlaps the one before it",
    ),
}


@pytest.mark.parametrize(("raw", "message"), BAD.values(), ids=BAD)
def test_bad_header_is_refused(raw, message):
    with pytest.raises(ShardMalformed, match=f"^model.gguf is not a valid GGUF file: .*{message}"):
        read(raw)


TRUNCATED = {
    "empty": b"",
    "magic alone": b"GGUF",
    "no tensors": padded(front(1), 64),
    "long text": one(pairs=[struct.pack("<Q", 1 << 62)]),
    "long list": one(pairs=[pair("k", _LIST, struct.pack("<IQ", 5, 1 << 20))]),
    "long list of texts": one(pairs=[pair("k", _LIST, struct.pack("<IQ", _TEXT, 1 << 20))]),
    "tensor behind the end": one(offset=4096),
    "offset 2**63": one(offset=1 << 63),
    "larger than the file": one(shape=(1 << 20, 1 << 20)),
    "2**62 elements": one(shape=(1 << 62,)),
}


@pytest.mark.parametrize("raw", TRUNCATED.values(), ids=TRUNCATED)
def test_header_that_promises_more_than_there_is(raw):
    with pytest.raises((ShardTruncated, ShardMalformed), match=r"^model\.gguf is "):
        read(raw)


def test_every_shorter_file_is_refused():
    raw = content(_SMALL, [pair("k", _LIST, struct.pack("<IQ", _TEXT, 2) + text("a") + text("b"))])
    last = read(raw).data_offset + 32 + 36
    for length in range(last):
        with pytest.raises(CheckpointError, match=r"^model\.gguf is"):
            read(raw[:length])
    assert read(raw[:last]) == read(raw)


def test_100_000_tensors():
    count = 100_000
    entries = (entry(f"blocks.{n}.weight", (32,), "Q8_0", 64 * n) for n in range(count))
    header = read(padded(front(count) + b"".join(entries)) + bytes(64 * count))
    assert len(header.tensors) == count
    assert header.tensors[-1].begin == 64 * (count - 1)


def test_no_byte_of_a_tensor_is_read(monkeypatch):
    pread, ends = os.pread, []

    def noted(fd, nbytes, offset):
        ends.append(offset + nbytes)
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", noted)
    header = read(content({"a": ("F32", (1 << 22,), bytes(1 << 24))}))
    # It reads ahead by 1 MiB, of whatever is there.
    assert max(ends) <= 1 << 20 < header.data_nbytes


def test_damaged_fields_are_refused_or_described():
    """As in test_formats, but with the numbers that matter in the places where they are."""
    whole = content(_SMALL, [pair("general.alignment", _U32, struct.pack("<I", 32))])
    end = read(whole).data_offset
    generator = random.Random(0)
    numbers = [0, 1, 2, 31, 255, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            size = generator.choice([1, 4, 8])
            at = generator.randrange(end - size)
            number = generator.choice([*numbers, generator.getrandbits(8)]) % (1 << 8 * size)
            raw[at : at + size] = number.to_bytes(size, "little")
        try:
            header = read(raw)
        except CheckpointError:
            continue
        for spec in header.tensors:
            assert 0 <= spec.begin <= spec.end <= len(raw) - header.data_offset
