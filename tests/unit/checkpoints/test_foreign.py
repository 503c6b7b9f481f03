"""What is not safetensors is recognised by its content, and named with the right remedy."""

import gzip
import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

from shmload._checkpoints.formats.foreign import name_of_kind, recognise
from shmload._checkpoints.formats.known import read_header
from shmload.errors import ShardMalformed, WrongFormat

_TENSORS = {"weight": torch.ones(3)}


def written(save):
    file = io.BytesIO()
    save(file)
    return file.getvalue()


_FILES = {
    "GGUF": [b"FUGG\0\0\0\x03" + bytes(100)],
    "PyTorch pickle": [
        written(lambda file: torch.save({"a": [torch.ones(2)]}, file)),
        written(
            lambda file: torch.save(_TENSORS, file, _use_new_zipfile_serialization=False),
        ),
        *(pickle.dumps({"weight": [1.0]}, protocol) for protocol in (2, 4, 5)),
    ],
    "NumPy": [
        written(lambda file: np.save(file, np.ones(3))),
        written(lambda file: np.savez(file, np.ones(3))),
    ],
    "HDF5": [b"\x89HDF\r\n\x1a\n" + bytes(100)],
    # msgpack: {"params": {...}}, and a map of 20 entries.
    "Flax msgpack": [b"\x81\xa6params\x82\xa4bias" + bytes(60), b"\xde\0\x14\xa4bias" + bytes(60)],
    # ModelProto: ir_version 8, producer_name "pytorch"; ir_version 4, opset_import.
    "ONNX": [b"\x08\x08\x12\x07pytorch\x1a\x052.4.0" + bytes(60), b"\x08\x04B\x04\n\0\x10\x0b"],
    "git-lfs pointer": [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"],
    "web page": [b"\n<!DOCTYPE html>\n<html>", b"<html><head>", b"<?xml version='1.0'?><Error>"],
    "zip archive": [b"PK\3\4" + bytes(26) + b"model.safetensors" + bytes(60)],
    "compressed file": [gzip.compress(b"weights", mtime=0), b"\x28\xb5\x2f\xfd" + bytes(60)],
    "JSON text": [b'{"error": "Repository not found"}', b'{\n  "weight_map": {}}'],
    "text": [b"Access to model org/name is restricted."],
}
_REMEDIES = {
    "GGUF": "little-endian",
    "PyTorch pickle": "save_pretrained",
    "NumPy": r"safetensors\.numpy\.save_file",
    "git-lfs pointer": "git lfs pull",
    "web page": "hf auth login",
    "zip archive": "unpack it",
    "ONNX": "runtime",
}
_CASES = [(kind, content) for kind, contents in _FILES.items() for content in contents]


@pytest.mark.parametrize(("kind", "content"), _CASES)
def test_kind_is_recognised_whatever_the_file_is_called(tmp_path, kind, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert name_of_kind(path) == kind
    with path.open("rb") as file, pytest.raises(WrongFormat, match=_REMEDIES.get(kind)) as caught:
        read_header(file.fileno(), path)
    assert (caught.value.kind, caught.value.nbytes) == (kind, len(content))
    assert str(caught.value).startswith(f"{path} is a")
    assert f"{len(content)} B)" in str(caught.value) or len(content) > 1023


@pytest.mark.parametrize(
    "content",
    [
        safetensors.torch.save(_TENSORS),
        safetensors.torch.save({}),
        b"",
        b"\x00" * 64,
        b"\x08\x01\0\0\0\0\0\0{" + b" " * 60,
    ],
)
def test_what_may_be_safetensors_is_of_no_other_kind(content):
    assert recognise(content[:64]) is None


def test_unknown_content_is_malformed_and_named_by_its_suffix(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(range(200, 256)) * 3)
    assert name_of_kind(path) == ".bin file"
    assert name_of_kind(tmp_path / "gone.pt") == ".pt file"
    with (
        path.open("rb") as file,
        pytest.raises(
            ShardMalformed, match="is not a valid PyTorch file: it does not end"
        ) as caught,
    ):
        read_header(file.fileno(), path)
    assert type(caught.value) is ShardMalformed
