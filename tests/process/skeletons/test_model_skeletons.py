"""Single models get skeletons as those of pipelines do."""

import diffusers
import pytest
import torch
import transformers
from comparing import assert_component_equal

import shmload
from shmload._building.skeletons import skeletons_of

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("skeletons")
@pytest.mark.parametrize(
    ("family", "cls", "subfolder"),
    [
        ("stable-diffusion", diffusers.UNet2DConditionModel, "unet"),
        ("stable-diffusion", diffusers.AutoencoderKL, "vae"),
        ("stable-diffusion", transformers.CLIPTextModel, "text_encoder"),
        ("flux", transformers.T5EncoderModel, "text_encoder_2"),
        ("wan", diffusers.WanTransformer3DModel, "transformer"),
        ("qwen-image", transformers.AutoModel, "text_encoder"),
        ("stable-diffusion", diffusers.AutoModel, "unet"),
    ],
)
def test_second_model_comes_from_its_skeleton(saved, built, family, cls, subfolder):
    source = str(saved(family))  # diffusers.AutoModel takes no Path
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        got = shmload.load_model(cls, source, subfolder=subfolder, dtype="bfloat16")
        states.append(torch.get_rng_state())
    assert len(built) == 1
    wanted = cls.from_pretrained(source, subfolder=subfolder, torch_dtype=torch.bfloat16)
    assert_component_equal(got, wanted, "model")
    assert torch.equal(*states)


@pytest.mark.usefixtures("skeletons")
def test_model_notes_the_source_as_it_was_given(saved):
    source = saved("stable-diffusion") / "unet"
    for given in (source, str(source), source, str(source)):
        got = shmload.load_model(diffusers.UNet2DConditionModel, given)
        wanted = diffusers.UNet2DConditionModel.from_pretrained(given)
        assert type(got.config["_name_or_path"]) is type(wanted.config["_name_or_path"])
        assert got.config["_name_or_path"] == given


@pytest.mark.usefixtures("skeletons")
def test_doctor_finds_a_model_by_any_name_of_its_folder(copied, monkeypatch):
    source = copied("stable-diffusion")
    shmload.load_model(diffusers.AutoencoderKL, source, subfolder="vae")
    monkeypatch.chdir(source.parent)
    for name in (str(source), f"{source}/", source.name, f"./{source.name}"):
        (found,) = skeletons_of(name)
        assert (found.class_name, found.reason) == ("AutoencoderKL", "")
    assert not skeletons_of(str(source.parent))
