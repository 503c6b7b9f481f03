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
_LORA = "pytorch_lora_weights.safetensors"


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
    code, printed, _ = command("warm", pipeline)
    assert code == 0
    assert "left to the library: unet/diffusion_pytorch_model.bin (" in printed
    code, printed, _ = command("plan", pipeline)
    assert "left to the library: unet/diffusion_pytorch_model.bin (" in printed


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


@pytest.mark.libraries
def test_error_of_the_library_gets_the_variant_that_there_is(variant, tmp_path):
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    ddpm = tmp_path / "ddpm"
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(ddpm, variant="fp16")
    with pytest.raises(OSError, match="Error no file named") as of_pipeline:
        shmload.load_pipeline(ddpm)
    with pytest.raises(OSError, match="Error no file named") as of_model:
        shmload.load_model("AutoencoderKL", variant)
    for caught in (of_pipeline, of_model):
        (note,) = caught.value.__notes__
        assert re.search(_ASK, note)
    assert "unet" in of_pipeline.value.__notes__[0]


# Adapters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [_LORA, "ip-adapter.safetensors"],
)
def test_adapter_is_read_by_folder_and_by_hub_id(tmp_path, hub_cache, evicts, name):
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(TENSORS, folder / name)
    hub_cache.add("org/adapter", folder)
    in_hub = {"cache_dir": hub_cache.root}
    for source, where in ((folder, {}), ("org/adapter", in_hub)):
        with shmload.view(source, dtype="bfloat16", **where) as path:
            assert_same(load_file(path / name), as_bf16(TENSORS))
        assert_same(shmload.load_state_dict(source, "bfloat16", **where), as_bf16(TENSORS))
        assert shmload.plan(source, **where).shards[0].path.name == name
        assert len(shmload.warm(source, dtype="bfloat16", **where).segments) == 1


def test_one_of_several_adapters_is_chosen_by_name(tmp_path, hub_cache, evicts):
    folder = tmp_path / "adapters" / "models"
    folder.mkdir(parents=True)
    for name in ("ip-adapter.safetensors", "ip-adapter-plus.safetensors"):
        save_file(TENSORS, folder / name)
    with pytest.raises(
        shmload.SourceNotFound, match=r"ip-adapter\.safetensors; choose with weight_"
    ):
        shmload.warm(folder)
    with shmload.view(folder, dtype="bfloat16", weight_name="ip-adapter.safetensors") as path:
        assert_same(load_file(path / "ip-adapter.safetensors"), as_bf16(TENSORS))
        assert_same(load_file(path / "ip-adapter-plus.safetensors"), TENSORS)
    hub_cache.add("org/adapters", folder.parent)
    where = {"cache_dir": hub_cache.root, "subfolder": "models"}
    both = ["ip-adapter.safetensors", "ip-adapter-plus.safetensors"]
    assert len(shmload.warm("org/adapters", weight_name=both, **where).segments) == 1  # one content
    with pytest.raises(shmload.ShardMissing, match="gone"):
        shmload.warm("org/adapters", weight_name="gone.safetensors", **where)
