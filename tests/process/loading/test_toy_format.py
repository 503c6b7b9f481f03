"""A new format of checkpoint files needs one module; all public functions then load it.

The format is `toy_format`: tensors in any order with gaps, and a trailer instead of a header.
"""

import os

import pytest
import torch
from comparing import DTYPES, assert_equal, reference
from safetensors.torch import load_file
from toy_format import TOY, save_toy
from warming import TENSORS, as_bf16, assert_same

import shmload
from shmload._checkpoints.formats import known

raw_and_cast = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _is_known(monkeypatch):
    monkeypatch.setattr(known, "FORMATS", (*known.FORMATS, TOY))


@pytest.fixture
def toy(tmp_path, evicts):
    """A checkpoint of one file."""
    path = tmp_path / "weights.toy"
    save_toy(TENSORS, path)
    return path


def wanted(dtype):
    return TENSORS if dtype is None else as_bf16(TENSORS)


@raw_and_cast
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("inline_nbytes", [0, 1 << 20], ids=["workers", "inline"])
def test_file_is_loaded(toy, configure, dtype, keep, inline_nbytes):
    configure(inline_nbytes=inline_nbytes, workers=2)
    assert_same(shmload.load_state_dict(toy, dtype, keep=keep), wanted(dtype))
    assert len(shmload.segments()) == keep


def test_damaged_file_is_refused_by_the_format_of_its_name(toy):
    os.truncate(toy, os.path.getsize(toy) - 1)
    with pytest.raises(shmload.ShardMalformed, match=rf"^{toy} is not a valid toy file: .*trailer"):
        shmload.load_state_dict(toy)


# Views --------------------------------------------------------------------------------------------


@pytest.mark.libraries
@pytest.mark.parametrize("dtype", ["bf16", "none"])
def test_pipeline_with_toy_components_is_equal(copied, evicts, dtype):
    given, meant = DTYPES[dtype]
    source = copied("stable-diffusion")
    wanted = reference(source, meant)
    for path, toy_name in {
        "vae/diffusion_pytorch_model.safetensors": "toy_model.toy",
        "text_encoder/model.safetensors": "toy.toy",
    }.items():
        save_toy(load_file(source / path), (source / path).with_name(toy_name))
        (source / path).unlink()
    assert_equal(shmload.load_pipeline(source, torch_dtype=given), wanted)
