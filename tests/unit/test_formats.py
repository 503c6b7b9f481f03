"""Which format a file has: its content says so before its name does."""

import pytest
import safetensors.torch
import torch
from toy_format import TOY, save_toy

from shmload._checkpoints.formats import known
from shmload._checkpoints.formats.format import HEAD_NBYTES
from shmload._checkpoints.formats.known import format_of, has_known_suffix, is_of_weights
from shmload._checkpoints.formats.safetensors import SAFETENSORS

_SAFETENSORS_HEAD = safetensors.torch.save({"a": torch.ones(3)})[:HEAD_NBYTES]
_TOY_HEAD = b"TOY\x00" + bytes(HEAD_NBYTES - 4)
_ALIEN_HEADS = [
    b"",
    b"{",
    b"\x00" * HEAD_NBYTES,
    b"PK\x03\x04" + bytes(HEAD_NBYTES - 4),
    b"GGUF\x03\x00\x00\x00{\x00\x00\x00" + bytes(HEAD_NBYTES - 12),
    b"\x80\x02}q\x00(X\x07\x00\x00\x00",
    b"version https://git-lfs.github.com/spec/v1\n",
]


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
    assert format_of("a/model.bin", head) is SAFETENSORS  # whose reader says what is wrong


def test_file_of_no_tensors_is_recognised():
    assert SAFETENSORS.recognises(safetensors.torch.save({}))


@pytest.mark.usefixtures("two_formats")
def test_names_of_weights():
    assert has_known_suffix("a.toy")
    assert not has_known_suffix("a.bin")
    assert is_of_weights("a.toy")
    assert is_of_weights("a.bin")
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
