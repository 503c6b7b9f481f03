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

_ASK = r"it has variant fp16: ask for it with variant='fp16' \(--variant fp16\)"
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
    assert (left.component, left.path, left.kind) == ("unet", path, "PyTorch pickle")
    assert left.nbytes == path.stat().st_size
    assert shmload.plan(pipeline).left_out == (left,)
    assert shmload.plan(pipeline, components=["vae"]).left_out == ()
    code, printed, _ = command("warm", pipeline)
    assert code == 0
    assert "left to the library: unet/diffusion_pytorch_model.bin (PyTorch pickle, " in printed
    code, printed, _ = command("plan", pipeline)
    (row,) = (line for line in printed.splitlines() if line.startswith("unet"))
    assert row.split()[1:3] == ["diffusion_pytorch_model.bin", "library"]
    assert "PyTorch pickle" in row


def test_pipeline_all_in_pickles_is_planned_and_not_warmed(pipeline, command):
    (pipeline / "vae" / "diffusion_pytorch_model.safetensors").rename(
        pipeline / "vae" / "diffusion_pytorch_model.gguf"
    )
    assert [each.component for each in shmload.plan(pipeline).left_out] == ["unet", "vae"]
    code, _, said = command("warm", pipeline)
    assert code == 1
    assert "unet/diffusion_pytorch_model.bin (PyTorch pickle, " in said
    assert "save_pretrained" in said


def test_view_warns_of_what_it_only_links(pipeline, caplog):
    with shmload.view(pipeline) as path:
        assert (path / "unet" / "diffusion_pytorch_model.bin").exists()
    assert "left to the library: unet/diffusion_pytorch_model.bin (PyTorch pickle" in caplog.text


def test_directory_of_a_pickle_is_left_to_the_library(tmp_path, caplog, shm_names):
    save_with_more(TENSORS, tmp_path / "pytorch_model.bin")
    (tmp_path / "optimizer.bin").touch()
    with shmload.view(tmp_path) as path:
        found = torch.load(path / "pytorch_model.bin")
        assert found.pop("epoch") == 3
        assert_same(found, TENSORS)
    assert "pytorch_model.bin (PyTorch pickle" in caplog.text
    assert "optimizer" not in caplog.text
    for door in (shmload.warm, shmload.load_state_dict):
        with pytest.raises(shmload.SourceNotFound, match=r"pytorch_model\.bin \(PyTorch pickle"):
            door(tmp_path)
    assert shm_names() == []


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
        with pytest.raises(shmload.SourceNotFound, match=r"no weights of variant 'bf16'.* fp16"):
            door(variant, variant="bf16")
    assert [each.kind for each in shmload.plan(variant).left_out] == ["variant fp16"]


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


@pytest.mark.libraries
@pytest.mark.parametrize("asked", [None, "bf16"])
def test_view_lets_the_librarys_error_through_with_the_sources_path(variant, asked):
    with pytest.raises(OSError, match="Error no file named") as wanted:
        diffusers.AutoencoderKL.from_pretrained(variant, variant=asked)
    with pytest.raises(OSError, match="Error no file named") as got, shmload.view(variant) as path:
        diffusers.AutoencoderKL.from_pretrained(path, variant=asked)
    assert str(got.value) == str(wanted.value)
    assert not isinstance(got.value, shmload.ShmloadError)
    assert "it has variant fp16" in got.value.__notes__[0]


@pytest.mark.libraries
def test_view_of_a_variant_that_is_not_there_reads_nothing(variant, shm_names):
    (variant / "diffusion_pytorch_model.fp16.safetensors").rename(
        variant / "diffusion_pytorch_model.safetensors"
    )
    with shmload.view(variant, variant="fp16", dtype="bfloat16", keep=True):
        assert shmload.segments() == []
    assert shm_names() == []


# Adapters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [_LORA, "adapter_model.safetensors", "learned_embeds.safetensors", "ip-adapter.safetensors"],
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


def test_one_of_several_adapters_is_chosen_by_name(tmp_path, hub_cache, command, evicts):
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
    code, printed, _ = command(
        *("warm", "org/adapters", "--subfolder", "models", "--cache-dir", hub_cache.root),
        *("--weight-name", both[0], "--weight-name", both[1]),
    )
    assert (code, printed.split(":")[1].split(",")[0]) == (0, " already resident")
    with pytest.raises(shmload.ShardMissing, match="gone"):
        shmload.warm("org/adapters", weight_name="gone.safetensors", **where)


def test_folder_of_a_cached_repository_is_found_without_a_configuration_in_its_root(
    tmp_path, hub_cache, evicts
):
    folder = tmp_path / "repository" / "unet"
    folder.mkdir(parents=True)
    save_file(TENSORS, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text("{}")
    hub_cache.add("org/only-subfolder", folder.parent)
    where = {"cache_dir": hub_cache.root, "subfolder": "unet"}
    assert_same(shmload.load_state_dict("org/only-subfolder", **where), TENSORS)
    with shmload.view("org/only-subfolder", **where) as path:
        assert (path / "config.json").exists()
    with pytest.raises(shmload.SourceNotFound, match="org/nothing"):
        shmload.warm("org/nothing", **where)
