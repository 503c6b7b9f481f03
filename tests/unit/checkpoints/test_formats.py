"""Every format's header reader passes the same tests, and a file's format is recognised."""

import math
import os

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_format import TOY, save_toy

from shmload._checkpoints.dtypes import unit_nbytes
from shmload._checkpoints.formats import known
from shmload._checkpoints.formats.known import format_named, format_of, is_of_weights
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.header import HEAD_NBYTES
from shmload.errors import CheckpointError

_SAFETENSORS_HEAD = safetensors.torch.save({"a": torch.ones(3)})[:HEAD_NBYTES]
_TOY_HEAD = b"TOY\x00" + bytes(HEAD_NBYTES - 4)
_ALIEN_HEADS = [
    b"",
    b"{",
    b"\x00" * HEAD_NBYTES,
    b"PK\x03\x04" + bytes(HEAD_NBYTES - 4),
    b"\x80\x02}q\x00(X\x07\x00\x00\x00",
    b"version https://git-lfs.github.com/spec/v1\n",
]


_TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(3, 0, 5, dtype=torch.float16),
    "odd.weight": torch.arange(77).to(torch.int8),
    "matrix": torch.randn(33, 65, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "bool": torch.arange(9) % 2 == 0,
}
# The others are described by their libraries: test_pytorch_format, test_gguf_format.
_FORMATS = [(SAFETENSORS, safetensors.torch.save_file), (TOY, save_toy)]
each_format = pytest.mark.parametrize(
    "file_format", [file_format for file_format, _ in _FORMATS], ids=lambda each: each.name
)


# What every format must do: add a new one to `_FORMATS` -------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the path and content of a file in each format, by its name."""
    files = {}
    for file_format, save in _FORMATS:
        path = tmp_path_factory.mktemp(file_format.name) / f"model{file_format.suffixes[0]}"
        save(_TENSORS, path)
        files[file_format.name] = (path, path.read_bytes())
    return files


@each_format
def test_own_file_is_recognised_and_no_other(file_format, saved):
    for other, (_, content) in saved.items():
        assert file_format.recognises(content[:HEAD_NBYTES]) == (file_format.name == other)
    assert not any(map(file_format.recognises, _ALIEN_HEADS))


@each_format
def test_header_says_where_each_tensor_is(file_format, saved):
    path, content = saved[file_format.name]
    with path.open("rb") as file:
        header = file_format.read_header(file.fileno(), path)
        assert file.tell() == 0
    assert {spec.name for spec in header.tensors} == _TENSORS.keys()
    for spec in header.tensors:
        tensor = _TENSORS[spec.name]
        begin = header.data_offset + spec.begin
        found = torch.frombuffer(
            bytearray(content[begin : begin + spec.nbytes] or b"."), dtype=torch.uint8
        )
        assert spec.shape == tensor.shape
        if spec.nbytes:
            assert torch.equal(found.view(tensor.dtype).view(spec.shape), tensor)
    assert header.data_nbytes == sum(tensor.nbytes for tensor in _TENSORS.values())


@each_format
@given(data=st.data())
def test_damaged_file_is_refused_or_described_within_its_bounds(file_format, saved, data):
    path, content = saved[file_format.name]
    damaged = bytearray(content[: data.draw(st.integers(0, len(content)), "length")])
    for _ in range(data.draw(st.integers(0, 4), "changes") if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    header, refusal = None, ""
    fd = os.memfd_create("damaged")
    try:
        os.write(fd, damaged)
        header = file_format.read_header(fd, path)
    except CheckpointError as exc:
        refusal = str(exc)
    finally:
        os.close(fd)
    assert header or refusal.startswith(str(path))
    for spec in header.tensors if header else ():
        begin = header.data_offset + spec.begin
        assert 0 <= begin <= begin + spec.nbytes <= len(damaged)
        element = unit_nbytes(spec.dtype, "F32")[0]
        assert math.prod(spec.shape) * element == spec.nbytes


# Which format a file has --------------------------------------------------------------------------


@pytest.fixture
def two_formats(monkeypatch):
    monkeypatch.setattr(known, "FORMATS", (SAFETENSORS, TOY))


@pytest.mark.usefixtures("two_formats")
@pytest.mark.parametrize("name", ["model.safetensors", "model.toy", "model.bin", "model"])
def test_content_tells_before_the_name(name):
    assert format_of(name, _SAFETENSORS_HEAD) is SAFETENSORS
    assert format_of(name, _TOY_HEAD) is TOY


@pytest.mark.usefixtures("two_formats")
@pytest.mark.parametrize("head", _ALIEN_HEADS)
def test_name_tells_where_the_content_does_not(head):
    assert format_of("a/model.toy", head) is TOY
    assert format_of("a/model.safetensors", head) is SAFETENSORS
    assert format_of("a/model.bin", head) is SAFETENSORS  # its reader reports the error


def test_file_of_no_tensors_is_recognised():
    assert SAFETENSORS.recognises(safetensors.torch.save({}))


@pytest.mark.usefixtures("two_formats")
def test_names_of_weights():
    assert format_named("a.toy")
    assert not format_named("a.onnx")
    assert is_of_weights("a.toy")
    assert is_of_weights("a.onnx")
    assert not is_of_weights("config.json")


def test_header_is_read_by_the_format_of_the_content(tmp_path, two_formats):
    path = tmp_path / "model.safetensors"
    save_toy({"a": torch.ones(3), "b": torch.zeros(5, 2).long()}, path)
    with path.open("rb") as file:
        header = known.read_header(file.fileno(), path)
    assert {spec.name: (spec.dtype, spec.shape, spec.nbytes) for spec in header.tensors} == {
        "a": ("F32", (3,), 12),
        "b": ("I64", (5, 2), 80),
    }
    assert header.data_nbytes == 92
