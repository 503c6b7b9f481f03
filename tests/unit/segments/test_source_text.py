"""A shard's path can be read from a segment's header, whatever bytes it has."""

import os

import pytest

from shmload._segments.metadata import source_path, source_text

_PATHS = [
    b"/models/unet.safetensors",
    "/modèles/猫.safetensors".encode(),
    b"/caf\xe9.safetensors",
    b"/back\\slash \\xe9.safetensors",
    b"/both \\ and \\xe9 and \xe9.safetensors",
    b"/\xff\xfe\n\x01",
]


@pytest.mark.parametrize("raw", _PATHS)
def test_path_can_be_read_back(raw):
    text = source_text(os.fsdecode(raw))
    text.encode()  # can be written as UTF-8
    assert os.fsencode(source_path(text)) == raw


def test_text_of_an_ordinary_path_is_the_path():
    assert source_text("/modèles/a\\b") == "/modèles/a\\b"
    assert source_path("/modèles/a\\b") == "/modèles/a\\b"
