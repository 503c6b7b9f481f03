"""`dtype="auto"` gives each model its checkpoint's own dtype, in every function."""

import json

import pytest
import torch
import transformers
from comparing import assert_component_equal, assert_equal, reference
from safetensors.torch import load_file, save_file

import shmload

pytestmark = pytest.mark.libraries

OWN = {
    "text_encoder": torch.float16,
    "text_encoder_2": torch.bfloat16,
    "transformer": torch.bfloat16,
    "vae": torch.float16,
}


@pytest.fixture
def mixed(copied):
    """A pipeline in bfloat16, but one model of each library in float16."""
    source = copied("flux", "bfloat16")
    vae = source / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor.half() for name, tensor in load_file(vae).items()}
    # A few weights in float32 come first in the file, and decide nothing.
    tensors |= {name: tensor.float() for name, tensor in list(tensors.items())[:1]}
    save_file(tensors, vae, {"format": "pt"})
    config = source / "text_encoder" / "config.json"
    named = {"dtype": "float16", "torch_dtype": "float16"}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    config = source / "text_encoder_2" / "config.json"  # names none: that of its weights counts
    plain = {k: v for k, v in json.loads(config.read_text()).items() if "dtype" not in k}
    config.write_text(json.dumps(plain))
    return source


def test_pipeline_equals_the_library_with_each_models_own_dtype(mixed):
    got = shmload.load_pipeline(mixed, dtype="auto")
    assert_equal(got, reference(mixed, OWN))
    alone = transformers.CLIPTextModel.from_pretrained(mixed / "text_encoder", dtype="auto")
    assert_component_equal(got.text_encoder, alone, "text_encoder")


def test_warm_plan_and_share_mean_the_same(mixed, evicts, shm_names):
    shmload.warm(mixed, dtype="auto")
    names = shm_names()
    assert {shard.action for shard in shmload.plan(mixed, dtype="auto").shards} == {
        shmload.Action.ATTACH
    }
    with shmload.share(mixed, dtype="auto") as handle:
        assert handle.load().vae.dtype is torch.float16
    shmload.load_pipeline(mixed, dtype="auto", keep=True)
    assert shm_names() == names
    placed, given = (shmload.plan(mixed, dtype=d, inventory="1x1GiB") for d in ("auto", OWN))
    assert placed.placement == given.placement


def test_file_and_state_dict_keep_the_stored_dtypes(mixed):
    file = mixed / "vae" / "diffusion_pytorch_model.safetensors"
    got = shmload.load_state_dict(file, dtype="auto")
    assert {tensor.dtype for tensor in got.values()} == {torch.float16, torch.float32}
    assert shmload.plan(file, dtype="auto").shards[0].conversion == "raw"
    # A component's directory names its class.
    vae = shmload.plan(file.parent, dtype="auto").shards[0]
    assert vae.conversion == "F16"
