"""What shmload does not read is named and left to the libraries; adapters are read."""

import json
import logging
import re

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from warming import TENSORS, as_bf16, assert_same

import shmload

_ASK = r"diffusion_pytorch_model\.fp16\.safetensors"


def save_with_more(tensors, path):
    """Write a file of PyTorch with something that is no tensor."""
    torch.save({**tensors, "epoch": 3}, path)


@pytest.fixture
def pipeline(tmp_path, evicts):
    """A pipeline with its VAE in safetensors, its UNet in a pickle, and an ordinary scheduler."""
    source = tmp_path / "pipeline"
    for name in ("unet", "vae", "scheduler"):
        (source / name).mkdir(parents=True)
    save_file(TENSORS, source / "vae" / "diffusion_pytorch_model.safetensors")
    save_with_more(TENSORS, source / "unet" / "diffusion_pytorch_model.bin")
    (source / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {"unet": ["x", "U"], "vae": ["x", "V"], "scheduler": ["x", "S"], "_class_name": "P"}
    (source / "model_index.json").write_text(json.dumps(index))
    return source


# Weights of another kind --------------------------------------------------------------------------


def test_component_in_a_pickle_is_named_by_warm_and_plan(pipeline, command, caplog):
    path = pipeline / "unet" / "diffusion_pytorch_model.bin"
    caplog.set_level(logging.INFO, "shmload")
    (left,) = shmload.warm(pipeline).left_out
    assert f"left to the library: {left}" in caplog.text
    assert (left.component, left.path) == ("unet", path)
    assert left.why == "its 'epoch' is no tensor"
    assert left.nbytes == path.stat().st_size
    assert shmload.plan(pipeline).left_out == (left,)
    assert shmload.plan(pipeline, components=["vae"]).left_out == ()
    for verb in ("warm", "plan"):
        said = command(verb, pipeline)[1]
        assert "left to the library: unet/diffusion_pytorch_model.bin (" in said


# Variants -----------------------------------------------------------------------------------------


@pytest.fixture
def variant(tmp_path, evicts):
    """A model of diffusers that was saved as a variant only."""
    model = diffusers.AutoencoderKL(
        block_out_channels=(8,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        norm_num_groups=4,
    )
    model.save_pretrained(tmp_path / "vae", variant="fp16")
    return tmp_path / "vae"


@pytest.mark.libraries
def test_variant_is_read_if_it_is_asked_for_and_else_named(variant):
    wanted = load_file(variant / "diffusion_pytorch_model.fp16.safetensors")
    assert_same(shmload.load_state_dict(variant, variant="fp16"), wanted)
    assert shmload.warm(variant, variant="fp16").left_out == ()
    for door in (shmload.warm, shmload.load_state_dict):
        with pytest.raises(shmload.SourceNotFound, match=_ASK):
            door(variant)
        with pytest.raises(shmload.SourceNotFound, match=r"no weights of variant 'bf16'.*fp16"):
            door(variant, variant="bf16")
    assert len(shmload.plan(variant).left_out) == 1
    with pytest.raises(OSError, match="Error no file named") as caught:
        shmload.load_model("AutoencoderKL", variant)
    assert re.search(_ASK, caught.value.__notes__[0])


# Adapters -----------------------------------------------------------------------------------------


def test_adapter_is_read_by_folder_hub_id_and_name(tmp_path, hub_cache, evicts):
    folder, name = tmp_path / "adapters" / "models", "ip-adapter.safetensors"
    folder.mkdir(parents=True)
    save_file(TENSORS, folder / name)
    hub_cache.add("org/adapters", folder.parent)
    in_hub = {"cache_dir": hub_cache.root, "subfolder": "models"}
    for source, where in ((folder, {}), ("org/adapters", in_hub)):
        with shmload.view(source, dtype="bfloat16", **where) as path:
            assert_same(load_file(path / name), as_bf16(TENSORS))
        assert_same(shmload.load_state_dict(source, "bfloat16", **where), as_bf16(TENSORS))
        assert shmload.plan(source, **where).shards[0].path.name == name
        assert len(shmload.warm(source, dtype="bfloat16", **where).segments) == 1
    save_file(TENSORS, folder / "ip-adapter-plus.safetensors")
    with pytest.raises(shmload.SourceNotFound, match=r"adapter\.safetensors; choose with weig"):
        shmload.warm(folder)
    with shmload.view(folder, dtype="bfloat16", weight_name=name) as path:
        assert_same(load_file(path / name), as_bf16(TENSORS))
        assert_same(load_file(path / "ip-adapter-plus.safetensors"), TENSORS)
    with pytest.raises(shmload.ShardMissing, match="gone"):
        shmload.warm(folder, weight_name="gone.safetensors")
