"""A pipeline is updated to a directory by the call that has made it."""

import diffusers
import pytest
import torch
from comparing import reference
from mappings import state_of
from pipelines import build, save
from warming import assert_same

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]


@pytest.fixture
def other(tmp_path):
    """Save a pipeline with other weights."""

    def save_other(family="stable-diffusion", **given):
        return save(family, tmp_path / "other", seed=7, **given)

    return save_other


@pytest.mark.parametrize(
    "load", [shmload.load_pipeline, lambda source, dtype: reference(source, dtype)]
)
def test_models_with_parts_in_float32(saved, other, load):
    source = other("wan")
    pipe = load(saved("wan"), dtype=torch.bfloat16)
    assert {each.dtype for each in pipe.transformer.parameters()} == {torch.bfloat16, torch.float32}
    shmload.update(pipe, source)
    assert_same(state_of(pipe), state_of(reference(source, torch.bfloat16)))


@pytest.mark.filterwarnings("ignore")  # of the missing checker
def test_component_that_was_left_out(saved, other):
    source = other()
    pipe = shmload.load_pipeline(saved("stable-diffusion"), safety_checker=None)
    published = shmload.publish(pipe, "unchecked").load()
    wanted = reference(source, safety_checker=None)
    for each in (pipe, published):
        shmload.update(each, source)
        assert_same(state_of(each), state_of(wanted))


def test_variant_and_what_takes_its_place(saved, other):
    source = other(dtype="float16", variant="fp16")
    given = {"variant": "fp16", "dtype": "float16"}
    pipe = shmload.load_pipeline(saved("stable-diffusion", "float16", variant="fp16"), **given)
    shmload.update(pipe, source)
    assert_same(state_of(pipe), state_of(reference(source, torch.float16, variant="fp16")))
    older = saved("stable-diffusion")
    shmload.update(pipe, older, variant=None)
    assert_same(state_of(pipe), state_of(reference(older, torch.float16)))
    with pytest.raises(shmload.PublicationError, match="float16"):
        shmload.update(pipe, source, dtype="float32")


def test_model_of_a_folder(saved, other):
    source = other()
    model = shmload.load_model("UNet2DConditionModel", saved("stable-diffusion"), subfolder="unet")
    alone = reference(saved("stable-diffusion")).unet
    shmload.update(model, source)
    shmload.update(alone, source, subfolder="unet")
    for each in (model, alone):
        assert_same(each.state_dict(), reference(source).unet.state_dict())


def test_components_that_were_passed_stay(saved, other):
    source = other()
    nets = [diffusers.ControlNetModel.from_unet(build("stable-diffusion").unet) for _ in "ab"]
    pipe = shmload.load_pipeline(
        saved("stable-diffusion"),
        pipeline_class="StableDiffusionControlNetPipeline",
        controlnet=nets,
    )
    control = pipe.controlnet
    before = {name: (each.data_ptr(), each.clone()) for name, each in control.state_dict().items()}
    shmload.update(pipe, source)
    assert pipe.controlnet is control
    for name, each in control.state_dict().items():
        assert each.data_ptr() == before[name][0]
        assert torch.equal(each, before[name][1])
    assert_same(pipe.unet.state_dict(), reference(source).unet.state_dict())
