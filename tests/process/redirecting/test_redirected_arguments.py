"""Many arguments, plainly and redirected: the same result, or the same error, by the known way.

tests/unit/redirecting/test_arguments.py has every argument that is left to the library.
"""

import os
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from diffusers.pipelines import pipeline_utils
from redirecting import assert_same

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_IS_NEW = hasattr(pipeline_utils, "_resolve_dtype")
_BF16, _FP16 = torch.bfloat16, torch.float16


class MyPipeline(diffusers.StableDiffusionPipeline):
    """A user's own class."""


class OwnMethod(diffusers.StableDiffusionPipeline):
    """A user's class that loads in its own way."""

    @classmethod
    def from_pretrained(cls, path, **kwargs):
        pipe = super().from_pretrained(path, **kwargs)
        pipe.was_marked = True
        return pipe


class MyUNet(diffusers.UNet2DConditionModel):
    """A user's own model, which keeps a part in float32."""

    _keep_in_fp32_modules = ("conv_in",)


def _scheduler():
    return diffusers.EulerDiscreteScheduler()


_PIPELINES = [
    # class, arguments, way
    (diffusers.DiffusionPipeline, {}, "shmload"),
    (diffusers.DiffusionPipeline, {"torch_dtype": _BF16, "use_safetensors": True}, "shmload"),
    (diffusers.DiffusionPipeline, {"dtype": _FP16}, "shmload" if _IS_NEW else "library"),
    (diffusers.DiffusionPipeline, {"torch_dtype": "auto"}, "library"),
    (diffusers.DiffusionPipeline, {"torch_dtype": {"unet": _BF16, "default": _FP16}}, "shmload"),
    (diffusers.DiffusionPipeline, {"torch_dtype": {"no_such": _BF16}}, "library"),
    (diffusers.DiffusionPipeline, {"variant": "fp16"}, "library"),
    (diffusers.DiffusionPipeline, {"variant": None, "revision": "main"}, "shmload"),
    (diffusers.DiffusionPipeline, {"local_files_only": True, "token": False}, "shmload"),
    (diffusers.DiffusionPipeline, {"device_map": "cpu"}, "library"),
    (diffusers.DiffusionPipeline, {"no_such_argument": 1}, "library"),
    (
        diffusers.StableDiffusionPipeline,
        {"safety_checker": None, "requires_safety_checker": False},
        "shmload",
    ),
    (diffusers.StableDiffusionPipeline, {"scheduler": _scheduler, "torch_dtype": _BF16}, "shmload"),
    (diffusers.StableDiffusionPipeline, {"unet": _scheduler}, "library"),
    (diffusers.AutoPipelineForImage2Image, {"safety_checker": None}, "shmload"),
    (diffusers.AutoPipelineForText2Image, {"enable_pag": True}, "library"),
    (diffusers.FluxPipeline, {}, "library"),
    (MyPipeline, {"torch_dtype": _FP16}, "shmload"),
    (OwnMethod, {"torch_dtype": _FP16}, "library"),
]
_UNET, _ENCODER = diffusers.UNet2DConditionModel, transformers.CLIPTextModel
_MODELS = [
    (_UNET, "unet", {"torch_dtype": _BF16}, "shmload"),
    (_UNET, "unet", {"dtype": _BF16}, "shmload" if _IS_NEW else "library"),
    (_UNET, "unet", {"output_loading_info": True}, "shmload"),
    (_UNET, "unet", {"sample_size": 16}, "library"),
    (_UNET, "unet", {"variant": "fp16"}, "library"),
    (_UNET, "no_such_folder", {}, "library"),
    (_UNET, "vae", {}, None),
    (diffusers.AutoModel, "text_encoder", {}, "shmload"),
    (diffusers.ModelMixin, "unet", {}, None),
    (MyUNet, "unet", {"torch_dtype": _BF16}, "shmload"),
    (_ENCODER, "text_encoder", {"dtype": _BF16}, "shmload"),
    (_ENCODER, "text_encoder", {"torch_dtype": _BF16}, "shmload"),
    (_ENCODER, "text_encoder", {"attn_implementation": "eager"}, "shmload"),
    (_ENCODER, "text_encoder", {"attn_implementation": "no_such"}, "library"),
    (_ENCODER, "text_encoder", {"output_loading_info": True}, "shmload"),
    (_ENCODER, "text_encoder", {"num_hidden_layers": 1}, "library"),
    (transformers.CLIPTextModelWithProjection, "text_encoder", {}, "shmload"),
    (transformers.AutoModel, "text_encoder", {"dtype": _BF16}, "shmload"),
    (transformers.AutoModelForCausalLM, "text_encoder", {}, "library"),
]


def _name(value):
    if isinstance(value, type):
        return value.__name__
    return "-".join(value) or "plain" if isinstance(value, dict) else str(value)


def _made(kwargs):
    """Return new objects for the components that are given by functions."""
    return {name: value() if callable(value) else value for name, value in kwargs.items()}


@pytest.mark.parametrize(("cls", "kwargs", "way"), _PIPELINES, ids=_name)
def test_pipeline(saved, ways, cls, kwargs, way):
    source = str(saved("stable-diffusion"))
    made = assert_same(lambda: cls.from_pretrained(source, **_made(kwargs)), ways)
    assert way is None or ways.taken == [way], ways.lines
    assert made is None or type(made).__module__ != "builtins"


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "subfolder", "kwargs", "way"), _MODELS, ids=_name)
def test_model(saved, ways, cls, subfolder, kwargs, way):
    source = str(saved("stable-diffusion"))
    given = {} if subfolder is None else {"subfolder": subfolder}
    assert_same(lambda: cls.from_pretrained(source, **given, **kwargs), ways)
    assert way is None or ways.taken == [way], ways.lines


@pytest.mark.parametrize(
    ("source", "way"),
    [
        (Path, "shmload"),
        (lambda source: str(os.path.relpath(source)), "shmload"),
        (lambda source: f"{source}/", "shmload"),
        (lambda source: f"{source}/no_such", "library"),
        (lambda source: "no-such-user/no-such-model", "library"),
        (lambda source: None, "library"),
    ],
    ids=["path", "relative", "slash", "missing", "hub", "none"],
)
def test_source(saved, ways, source, way):
    given = source(saved("stable-diffusion"))
    assert_same(lambda: diffusers.DiffusionPipeline.from_pretrained(given), ways)
    assert ways.taken == [way], ways.lines


@pytest.mark.parametrize(
    ("family", "dtype", "saving"),
    [
        ("stable-diffusion", _FP16, {"dtype": "float16", "variant": "fp16"}),
        ("sdxl", None, {"dtype": "float16"}),
        ("flux", {"transformer": _BF16, "default": _FP16}, {"sharded": True}),
        ("wan", _BF16, {}),
        ("qwen-image", _BF16, {}),
    ],
)
def test_families(saved, ways, family, dtype, saving):
    source = str(saved(family, **saving))
    given = {name: saving[name] for name in ("variant",) if name in saving}
    if dtype is not None:
        given["torch_dtype"] = dtype
    assert_same(lambda: diffusers.DiffusionPipeline.from_pretrained(source, **given), ways)
    assert ways.taken == ["shmload"], ways.lines
