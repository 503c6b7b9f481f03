"""Models and pipelines from one file of weights equal what `from_single_file` gives."""

import re

import diffusers
import pytest
import torch
from comparing import assert_component_equal, assert_equal
from mappings import in_no_segment, state_of
from safetensors.torch import save_file

import shmload
from shmload._building import build

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("remembers")]

DTYPES = [None, torch.bfloat16]


def library_alone(cls, path, config, dtype, **kwargs):
    given = {} if dtype is None else {"torch_dtype": dtype}
    return cls.from_single_file(str(path), config=config, **given, **kwargs)


def decoded():
    """Return the segments that have a file's weights."""
    return [info for info in shmload.segments() if not info.kept]


def private_nbytes(pipe):
    """Return how many bytes of a pipeline's weights are in no segment."""
    return sum(each.nbytes for each in in_no_segment(state_of(pipe)).values())


# Pipelines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stable_diffusion_is_shared_whole(one_file, dtype, evicts):
    config, path = one_file("stable-diffusion")
    got = shmload.load_pipeline(path, config=config, dtype=dtype, keep=True)
    wanted = library_alone(diffusers.StableDiffusionPipeline, path, config, dtype)
    assert_equal(got, wanted)
    assert private_nbytes(got) == 0
    resident = [segment.name for segment in decoded()]
    assert_equal(shmload.load_pipeline(path, config=config, dtype=dtype, keep=True), wanted)
    assert [segment.name for segment in decoded()] == resident


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdxl_copies_only_what_diffusers_joins_and_says_so(
    one_file, suffix, dtype, evicts, caplog, monkeypatch
):
    caplog.set_level("INFO", "shmload")
    monkeypatch.setattr(build, "_LEAST_NBYTES", 1 << 10)
    config, path = one_file("sdxl", suffix)
    shmload.warm(path, dtype=dtype)
    got = shmload.load_pipeline(path, config=config, dtype=dtype)
    wanted = library_alone(diffusers.StableDiffusionXLPipeline, path, config, dtype)
    assert_equal(got, wanted)
    # In the file its second encoder has one tensor for three projections, and one transposed.
    encoder = sum(each.nbytes for each in got.text_encoder_2.state_dict().values())
    assert 0 < private_nbytes(got) < encoder
    assert re.search(rf"{path}: [\d.]+ KiB lie in no segment", caplog.text)


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("subfolder", "name"), [("unet", "UNet2DConditionModel"), ("vae", "AutoencoderKL")]
)
def test_model_of_a_whole_pipeline(one_file, subfolder, name, dtype, evicts):
    config, path = one_file("stable-diffusion")
    assert_model_equal(name, path, config, subfolder, dtype)


def assert_model_equal(name, path, config, subfolder, dtype):
    given = {"config": config, "subfolder": subfolder, "dtype": dtype}
    got = shmload.load_model(name, path, **given)
    wanted = library_alone(getattr(diffusers, name), path, **given)
    assert_component_equal(got, wanted, subfolder)


def test_model_with_the_names_of_diffusers(saved, evicts):
    # It keeps some tensors in float32, but not from one file.
    (path,) = (saved("wan") / "transformer").glob("*.safetensors")
    name, config = "WanTransformer3DModel", str(saved("wan"))
    assert_model_equal(name, path, config, "transformer", torch.bfloat16)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "a file of weights names no class; give pipeline_class"),
        ({"config": "no/such"}, "give pipeline_class"),
        ({"pipeline_class": "StableDiffusionPipeline", "variant": "fp16"}, "variant is for dir"),
        ({"pipeline_class": "StableDiffusionPipeline", "components": ["vae"]}, "text_encoder=None"),
        ({"pipeline_class": "StableDiffusionPipeline", "dtype": {"vae": "F16"}}, "one dtype"),
        ({"pipeline_class": "WanPipeline"}, "no class with a `from_single_file`"),
    ],
)
def test_wrong_arguments_of_a_pipeline(one_file, given, message, evicts):
    _, path = one_file("stable-diffusion")
    with pytest.raises(shmload.ArgumentError, match=re.escape(message)):
        shmload.load_pipeline(path, **given)
    assert decoded() == []


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
def test_file_without_its_end(one_file, suffix, tmp_path, evicts):
    config, path = one_file("stable-diffusion", suffix)
    damaged = tmp_path / f"model{suffix}"
    damaged.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(shmload.ShardTruncated, match=f"{damaged} is truncated"):
        shmload.load_pipeline(damaged, config=config)
    assert decoded() == []


def test_error_of_the_library_names_the_file(one_file, tmp_path, evicts):
    config, _ = one_file("stable-diffusion")
    path = tmp_path / "other.safetensors"
    save_file({"some.weight": torch.zeros(4)}, path)
    with pytest.raises(Exception, match="appear to be missing") as caught:
        shmload.load_model("AutoencoderKL", path, config=config, subfolder="vae")
    assert "shmload-view" not in str(caught.value)
