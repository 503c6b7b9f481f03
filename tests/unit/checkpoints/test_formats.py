"""A file's format is told by its content, and only else by its name."""

import pytest
import safetensors.torch
import torch
from gguf_files import content

from shmload._checkpoints.formats.gguf import GGUF
from shmload._checkpoints.formats.known import FORMATS, format_of
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.header import HEAD_NBYTES

_ALIEN_HEADS = [
    b"",
    b"{",
    b"\x00" * HEAD_NBYTES,
    b"PK\x03\x04" + bytes(HEAD_NBYTES - 4),
    b"\x80\x02}q\x00(X\x07\x00\x00\x00",
    b"version https://git-lfs.github.com/spec/v1\n",
]
_TENSORS = {"matrix": torch.randn(33, 65).bfloat16()}


def save_gguf(tensors, path):
    path.write_bytes(content({"a": ("F32", (1,), bytes(4))}))


_SAVES = [safetensors.torch.save_file, torch.save, save_gguf]  # in the order of `FORMATS`


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Return the beginning of a file in each format, by the format's name."""
    found = {}
    for file_format, save in zip(FORMATS, _SAVES, strict=True):
        path = tmp_path_factory.mktemp("format") / "model"
        save(_TENSORS, path)
        found[file_format.name] = path.read_bytes()[:HEAD_NBYTES]
    return found


@pytest.mark.parametrize("file_format", FORMATS, ids=lambda each: each.name)
def test_content_tells_before_the_name(file_format, heads):
    for name in ("model.safetensors", "model.gguf", "model.bin", "model"):
        assert format_of(name, heads[file_format.name]) is file_format
    assert not any(map(file_format.recognises, _ALIEN_HEADS))


@pytest.mark.parametrize("head", _ALIEN_HEADS)
def test_name_tells_where_the_content_does_not(head):
    assert format_of("a/model.gguf", head) is GGUF
    assert format_of("a/model.safetensors", head) is SAFETENSORS
    assert format_of("a/model.h5", head) is SAFETENSORS  # its reader reports the error
