"""Of a repository on the hub a load needs the files that its library would read."""

import pytest

from shmload._checkpoints.wanted import Hub, Wanted
from shmload._checkpoints.weights import files_of_model

_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
_VARIANT = ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"]
_OTHERS = ["pytorch_model.bin", "pytorch_model.fp16.bin", "flax_model.msgpack", "model.onnx"]
_SMALL = ["config.json", "model.safetensors.index.json", "tokenizer.model", "vocab.txt"]
_REPOSITORY = [
    *(f"encoder/{name}" for name in (*_SHARDS, *_VARIANT, *_OTHERS, *_SMALL)),
    "encoder/deep/model.safetensors",
    "decoder/model.safetensors",
    "decoder/config.json",
    "model_index.json",
    "own.py",
    "package/own.py",
    "README.md",
    "picture.png",
]
_ROOT = {"model_index.json", "own.py", "package/own.py"}


def weights(names=_REPOSITORY, subfolder="encoder/", variant=None, **kwargs):
    """Return the files of weights that are needed, without their folder."""
    wanted = Wanted(source="org/name", variant=variant, hub=Hub(subfolder=subfolder))
    found = files_of_model(names, wanted, kwargs)
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    small = {f"{prefix}{name}" for name in _SMALL} & set(names)
    assert set(found) >= small | (_ROOT & set(names))
    return [name.removeprefix(prefix) for name in found if name not in small | _ROOT]


@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({}, _SHARDS),
        ({"variant": "fp16"}, _VARIANT),
        ({"use_safetensors": True}, _SHARDS),
        ({"use_safetensors": False}, ["pytorch_model.bin"]),
        ({"use_safetensors": False, "variant": "fp16"}, ["pytorch_model.fp16.bin"]),
        ({"variant": "bf16"}, []),  # the library says that it is not there
        ({"gguf_file": "model.onnx"}, ["model.onnx"]),
        ({"from_flax": True}, sorted([*_SHARDS, *_VARIANT, *_OTHERS])),
    ],
)
def test_weights_are_those_of_one_format_and_variant(kwargs, wanted):
    assert weights(**kwargs) == wanted


def test_what_the_preferred_format_lacks_comes_in_another():
    names = [f"encoder/{name}" for name in ("pytorch_model.bin", "config.json")]
    assert weights(names) == ["pytorch_model.bin"]
    assert weights(names, use_safetensors=True) == []
    assert weights(["encoder/model.gguf"]) == ["model.gguf"]


def test_old_names_of_shards_with_a_variant_are_known():
    old = ["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"]
    names = [f"encoder/{name}" for name in (*old, "model.safetensors")]
    assert weights(names, variant="fp16") == old
