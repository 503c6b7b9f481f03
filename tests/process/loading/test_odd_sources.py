"""Odd pipelines load like with the library, and broken ones raise the library's error."""

import json
import math
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


def test_clip_checkpoint_with_the_hubs_names_is_equal(copied):
    # Models on the hub were saved by transformers <= 4: with a prefix, and a buffer since removed.
    source = copied("sdxl")
    for path in source.glob("text_encoder*/model.safetensors"):
        tensors = {
            name
            if name.startswith(("text_model.", "text_projection."))
            else f"text_model.{name}": t
            for name, t in load_file(path).items()
        }
        tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
        save_file(tensors, path, {"format": "pt"})
    assert_loads_equal(source, "bf16")


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("transformer/config.json", "{"),
        ("transformer/config.json", {"joint_attention_dim": 32}),
        ("vae/config.json", None),
    ],
)
def test_error_of_the_library_speaks_of_the_source(copied, file, content):
    source = copied("flux")
    path = source / file
    if content is None:
        path.unlink()
    else:
        path.write_text(
            content if content == "{" else json.dumps(json.loads(path.read_text()) | content)
        )
    errors = []
    for load in (shmload.load_pipeline, reference):
        with pytest.raises(Exception) as caught:  # noqa: PT011 of any kind
            load(source, torch_dtype=torch.bfloat16)
        errors.append((type(caught.value), str(caught.value)))
        if load is shmload.load_pipeline:
            text = "".join(traceback.format_exception(caught.value))
            assert "shmload-" not in text
            assert not mentions_of_view([vars(caught.value), caught.value.args])
    if issubclass(errors[0][0], shmload.ShmloadError):
        assert str(source) in errors[0][1]
    else:
        assert errors[0] == errors[1]


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
