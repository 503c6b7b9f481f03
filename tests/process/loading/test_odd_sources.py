"""Odd pipelines load like with the library, and broken ones raise the library's error."""

import json
import math
import re
import shutil
import traceback

import pytest
import torch
import transformers
from comparing import (
    DTYPES,
    assert_component_equal,
    assert_equal,
    assert_loads_equal,
    reference,
)
from safetensors.torch import load_file, save_file
from traces import Messages, mentions_of_view, naming

import shmload

pytestmark = pytest.mark.libraries


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "none"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_nan_infinity_and_negative_zero_keep_their_bits(copied, stored, dtype):
    source = copied("flux", stored)
    given, meant = DTYPES[dtype]
    for path in sorted(source.rglob("*.safetensors")):
        tensors = load_file(path)
        for number, tensor in enumerate(tensors.values()):
            odd = [math.nan, -math.nan, math.inf, -math.inf, -0.0, 1e-40, -1e-7, 3e38, 65519.0]
            flat = tensor.view(-1)
            place = number % 7 if flat.numel() > 16 else 0
            count = min(len(odd), flat.numel() - place)
            flat[place : place + count] = torch.tensor(odd[:count], dtype=torch.float64)
        save_file(tensors, path, {"format": "pt"})
    got = shmload.load_pipeline(source, torch_dtype=given)
    assert_equal(got, reference(source, meant))
    assert got.transformer.proj_out.weight.isnan().any()


@pytest.mark.usefixtures("either_order")
@pytest.mark.parametrize("dtype", ["bf16", "none"])
def test_missing_and_unexpected_keys_are_told_and_filled_alike(copied, dtype):
    source = copied("stable-diffusion")
    for path, missing in {
        "unet/diffusion_pytorch_model.safetensors": "mid_block.resnets.0.norm1.weight",
        "text_encoder/model.safetensors": ".mlp.fc1.weight",
    }.items():
        tensors = load_file(source / path)
        del tensors[next(name for name in tensors if name.endswith(missing))]
        tensors["unexpected.weight"] = torch.ones(3)
        save_file(tensors, source / path, {"format": "pt"})
    with Messages() as said:
        reference(source)
    assert str(said.texts).count("unexpected.weight") >= 2
    assert "mlp.fc1.weight" in str(said.texts)
    torch.manual_seed(0)
    with Messages() as said_here:
        got = shmload.load_pipeline(source, torch_dtype=DTYPES[dtype][0])
    torch.manual_seed(0)
    assert_equal(got, reference(source, DTYPES[dtype][1]))
    # A model that draws weights is built twice if its bytes come last.
    assert set(said.texts) <= set(naming(source, said_here.texts))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "none"])
@pytest.mark.parametrize("family", ["stable-diffusion", "sdxl"])
def test_clip_checkpoint_with_the_hubs_names_is_equal(copied, family, dtype):
    # Models on the hub were saved by transformers <= 4: with a prefix, and a buffer since removed.
    source = copied(family)
    for path in source.glob("text_encoder*/model.safetensors"):
        tensors = {
            name
            if name.startswith(("text_model.", "text_projection."))
            else f"text_model.{name}": t
            for name, t in load_file(path).items()
        }
        tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
        save_file(tensors, path, {"format": "pt"})
    assert_loads_equal(source, dtype)


# Errors -------------------------------------------------------------------------------------------


def break_configuration(source):
    (source / "transformer" / "config.json").write_text("{")


def break_shape(source):
    change_json(source / "transformer" / "config.json", joint_attention_dim=32)


def break_tokenizer(source):
    (source / "tokenizer" / "tokenizer_config.json").write_text("{")
    (source / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)


def remove_configuration(source):
    (source / "vae" / "config.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        break_configuration,
        break_shape,
        break_tokenizer,
        remove_configuration,
    ],
)
def test_error_of_the_library_speaks_of_the_source(copied, damage):
    source = copied("flux")
    damage(source)
    with pytest.raises(Exception) as got:  # noqa: PT011  # see below
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        reference(source, torch.bfloat16)
    if isinstance(got.value, shmload.ShmloadError):
        assert str(source) in str(got.value)
    else:
        assert (type(got.value), str(got.value)) == (type(wanted.value), str(wanted.value))
    text = "".join(traceback.format_exception(got.value))
    assert not re.findall("shmload-[^ ]*", text)
    assert not mentions_of_view([vars(got.value), got.value.args])


def test_path_that_is_no_text_is_loaded_and_named_in_errors(tmp_path):
    folder = tmp_path / "\udcff"
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file({"a": torch.arange(100.0)}, tmp_path / path.name)
    (tmp_path / path.name).rename(path)
    state = shmload.load_state_dict(path, "bfloat16", keep=True)
    assert torch.equal(state["a"], torch.arange(100.0).bfloat16())
    assert shmload.warm(folder, torch_dtype="bfloat16").read_nbytes == 0
    (info,) = shmload.segments()
    assert info.source == str(path)
    assert info.is_current
    assert shmload.collect_garbage() == []
    del state
    assert [removed.name for removed in shmload.evict(folder)] == [info.name]


def test_shards_elsewhere_are_left_to_transformers(saved, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(saved("stable-diffusion") / "text_encoder", source)
    (source / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    names = load_file(tmp_path / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    wanted = transformers.CLIPTextModel.from_pretrained(source)
    got = shmload.load_model("CLIPTextModel", source)
    assert_component_equal(got, wanted, "text_encoder")
