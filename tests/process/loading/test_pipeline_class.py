"""`pipeline_class=`: what the class itself gives for `from_pretrained` is what a load gives."""

import diffusers
import pytest
import torch
from comparing import assert_equal, from_pretrained
from traces import Messages, mentions_of_view, naming

import shmload
from shmload.errors import ArgumentError

pytestmark = pytest.mark.libraries


class Mine(diffusers.DiffusionPipeline):
    """A user's own class, which takes fewer components than the source has."""

    def __init__(self, vae, text_encoder, tokenizer, unet, scheduler):
        super().__init__()
        self.register_modules(
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=unet,
            scheduler=scheduler,
        )


def assert_loads_by_class(pipeline_class, source, given=None, **kwargs):
    torch.manual_seed(0)
    with Messages() as said:
        got = shmload.load_pipeline(
            source, pipeline_class=given or pipeline_class, dtype="bfloat16", **kwargs
        )
    torch.manual_seed(0)
    with Messages() as wanted_said:
        wanted = from_pretrained(pipeline_class, source, torch.bfloat16, **kwargs)
    assert_equal(got, wanted)
    assert naming(source, said.texts) == wanted_said.texts
    assert not mentions_of_view(got)
    return got


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("stable-diffusion", "StableDiffusionImg2ImgPipeline"),
        ("stable-diffusion", "DiffusionPipeline"),
        ("stable-diffusion", "AutoPipelineForText2Image"),
        ("sdxl", "AutoPipelineForImage2Image"),
        ("flux", "AutoPipelineForInpainting"),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_class_of_diffusers_is_the_one_that_loads(saved, family, name, is_named):
    pipeline_class = getattr(diffusers, name)
    assert_loads_by_class(pipeline_class, saved(family), name if is_named else None)


def test_subclass_of_a_user_is_the_one_that_loads(saved, evicts):
    source = saved("stable-diffusion")
    got = assert_loads_by_class(Mine, source)
    assert type(got) is Mine
    kept = shmload.load_pipeline(source, pipeline_class=Mine, dtype="bfloat16", keep=True)
    # The class takes no safety checker: it is not decoded.
    assert len(shmload.segments()) == 3
    assert_equal(kept, got)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("StableDiffusionImg2ImgPipelin", "did you mean 'StableDiffusionImg2ImgPipeline'"),
        ("UNet2DConditionModel", "use load_model"),
    ],
)
def test_what_is_no_class_of_pipelines_is_refused(saved, evicts, given, text):
    with pytest.raises(ArgumentError, match=text):
        shmload.load_pipeline(saved("stable-diffusion"), pipeline_class=given, keep=True)
    assert not shmload.segments()


def test_class_whose_packages_are_missing_names_them(saved, monkeypatch):
    name = "OnnxStableDiffusionPipeline"
    dummies = diffusers.utils.dummy_torch_and_transformers_and_onnx_objects
    monkeypatch.setattr(diffusers, name, getattr(dummies, name), raising=False)
    with pytest.raises(ImportError, match="onnxruntime"):
        shmload.load_pipeline(saved("stable-diffusion"), pipeline_class=name)


def test_handle_brings_the_class(saved):
    given = {"pipeline_class": diffusers.StableDiffusionImg2ImgPipeline, "dtype": "bfloat16"}
    with shmload.share(saved("stable-diffusion"), **given) as handle:
        assert handle.facts["pipeline_class"] == '"StableDiffusionImg2ImgPipeline"'
        assert type(shmload.Handle.from_text(handle.text).load()) is given["pipeline_class"]
