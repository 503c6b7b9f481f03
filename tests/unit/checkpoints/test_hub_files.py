"""URLs of files on the hub are told from those of other servers."""

import pytest

from shmload._checkpoints.hub import HubFile, hub_file_of
from shmload.errors import ArgumentError

MAIN = HubFile("org/repo", "unet/model.safetensors", "main")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("https://huggingface.co/org/repo/blob/main/unet/model.safetensors", MAIN),
        ("https://hf.co/org/repo/resolve/main/unet/model.safetensors", MAIN),
        ("https://www.huggingface.co/org/repo/raw/main/unet/model.safetensors", MAIN),
        ("https://hub.example.org/org/repo/blob/main/unet/model.safetensors", MAIN),
        (
            "https://huggingface.co/org/repo/resolve/refs%2Fpr%2F7/a%20b.ckpt?download=true",
            HubFile("org/repo", "a b.ckpt", "refs/pr/7"),
        ),
        ("https://huggingface.co/org/repo/m.gguf", HubFile("org/repo", "m.gguf", None)),
        ("https://huggingface.co/org/repo/unet/m.gguf", HubFile("org/repo", "unet/m.gguf", None)),
        ("https://example.org/org/repo/blob/main/model.safetensors", None),
        ("s3://huggingface.co/org/repo/blob/main/model.safetensors", None),
    ],
)
def test_file_of_a_url(monkeypatch, url, wanted):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.org")
    assert hub_file_of(url) == wanted


@pytest.mark.parametrize("path", ["", "/tree/main/unet", "/blob/main", "/"])
def test_page_without_a_file(path):
    with pytest.raises(ArgumentError, match="give the hub id, such as org/repo"):
        hub_file_of(f"https://huggingface.co/org/repo{path}")


def test_url_that_is_none_is_named():
    with pytest.raises(ArgumentError, match="is no URL"):
        hub_file_of("http://[::1")
