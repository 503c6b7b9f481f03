"""`load_model`: what the class itself gives for `from_pretrained` is what a load gives."""

import json

import diffusers
import pytest
import torch
import transformers
from comparing import assert_component_equal
from diffusers.pipelines import pipeline_utils
from pipelines import build
from safetensors.torch import save_file
from traces import Messages, mentions_of_view, naming

import shmload
from shmload.errors import ArgumentError

pytestmark = pytest.mark.libraries

_OF_DIFFUSERS = "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype"


def from_pretrained(cls, source, dtype, **kwargs):
    """Load with the library alone."""
    is_of_diffusers = issubclass(cls, (diffusers.ModelMixin, diffusers.AutoModel))
    keyword = _OF_DIFFUSERS if is_of_diffusers else "dtype"
    given = {} if dtype is None else {keyword: dtype}
    return cls.from_pretrained(source, **given, **kwargs)


def assert_model_equal(cls, source, dtype=torch.bfloat16, given=None, **kwargs):
    """Load with both, compare models and messages; return shmload's model."""
    torch.manual_seed(0)
    with Messages() as said:
        got = shmload.load_model(given or cls, source, dtype=dtype, **kwargs)
    torch.manual_seed(0)
    with Messages() as wanted_said:
        wanted = from_pretrained(cls, source, dtype, **kwargs)
    assert_component_equal(got, wanted, "model")
    assert naming(source, said.texts) == wanted_said.texts
    assert not mentions_of_view(got)
    return got


# Classes ------------------------------------------------------------------------------------------


class Mine(diffusers.UNet2DConditionModel):
    """A user's own class, which keeps a part in float32."""

    _keep_in_fp32_modules = ("conv_in",)


@pytest.mark.parametrize(
    ("family", "cls", "subfolder", "given"),
    [
        ("stable-diffusion", diffusers.UNet2DConditionModel, "unet", "UNet2DConditionModel"),
        ("stable-diffusion", transformers.CLIPTextModel, "text_encoder", "CLIPTextModel"),
        ("stable-diffusion", transformers.AutoModel, "text_encoder", "AutoModel"),
        ("stable-diffusion", diffusers.AutoModel, "text_encoder", "diffusers.AutoModel"),
        ("stable-diffusion", diffusers.AutoModel, "vae", None),
        ("wan", diffusers.WanTransformer3DModel, "transformer", None),
        ("flux", transformers.T5EncoderModel, "text_encoder_2", None),
        ("stable-diffusion", Mine, "unet", None),
    ],
)
def test_model_equals_that_of_its_class(saved, family, cls, subfolder, given):
    assert_model_equal(cls, str(saved(family)), given=given, subfolder=subfolder)


@pytest.mark.parametrize("dtype", [None, "auto"])
@pytest.mark.parametrize(
    ("cls", "folder"),
    [(diffusers.UNet2DConditionModel, "unet"), (transformers.CLIPTextModel, "text_encoder")],
)
def test_dtype_means_what_it_means_for_the_class(saved, cls, folder, dtype):
    # The folder alone, which holds float16.
    source = saved("stable-diffusion", "float16") / folder
    if dtype == "auto" and cls is diffusers.UNet2DConditionModel:  # which knows no "auto"
        got = shmload.load_model(cls, source, dtype=dtype)
        assert_component_equal(got, from_pretrained(cls, source, torch.float16), folder)
    else:
        assert_model_equal(cls, source, dtype)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("UNet2DConditionModl", "did you mean 'UNet2DConditionModel'"),
        (dict, "from_pretrained"),
    ],
)
def test_what_is_no_class_of_models_is_refused(saved, evicts, given, text):
    with pytest.raises(ArgumentError, match=text):
        shmload.load_model(given, saved("stable-diffusion"), subfolder="unet", keep=True)
    assert not shmload.segments()


# Sources ------------------------------------------------------------------------------------------


def test_class_that_reads_the_folders_beside_its_own_gets_them(tmp_path):
    unet = build("stable-diffusion").unet
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_channels=3)
    diffusers.MultiControlNetModel([net, net]).save_pretrained(str(tmp_path / "net"))
    source = str(tmp_path / "net")
    got = shmload.load_model("MultiControlNetModel", source, dtype="bfloat16")
    wanted = from_pretrained(diffusers.MultiControlNetModel, source, torch.bfloat16)
    assert len(got.nets) == 2
    for net, wanted_net in zip(got.nets, wanted.nets, strict=True):
        assert_component_equal(net, wanted_net, "net")


_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own-of-a-test"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4)
        self.post_init()
"""


def test_code_of_the_repository_makes_the_same_class(tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(modules)
    source = tmp_path / "own.model"
    source.mkdir()
    (source / "own.py").write_text(_CODE)
    config = {"model_type": "own-of-a-test", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (source / "config.json").write_text(json.dumps(config))
    tensors = {"linear.weight": torch.ones(4, 4), "linear.bias": torch.ones(4)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    wanted = transformers.AutoModel.from_pretrained(
        source, trust_remote_code=True, dtype=torch.bfloat16
    )
    for _ in range(2):
        got = shmload.load_model(
            transformers.AutoModel, source, trust_remote_code=True, dtype="bfloat16"
        )
        assert_component_equal(got, wanted, "model")
    assert len(list(modules.glob("transformers_modules/*/"))) == 1


@pytest.mark.parametrize(
    ("cls", "subfolder", "variant"),
    [
        (diffusers.UNet2DConditionModel, "unet", "fp16"),
        (transformers.CLIPTextModel, "text_encoder", "fp16"),
        (diffusers.UNet2DConditionModel, "no-such", None),
    ],
)
def test_errors_are_those_of_the_library(saved, evicts, cls, subfolder, variant):
    given = {"subfolder": subfolder, "variant": variant}
    errors = []
    for load in (shmload.load_model, from_pretrained):
        with pytest.raises(OSError, match=r"file named|no-such") as caught:
            load(cls, saved("stable-diffusion"), dtype=torch.bfloat16, **given)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    assert not shmload.segments()


# What lasts ---------------------------------------------------------------------------------------


def test_model_and_pipeline_share_segments(saved, evicts):
    source = saved("stable-diffusion")
    pipe = shmload.load_pipeline(source, dtype="bfloat16", keep=True)
    count = len(shmload.segments())
    shmload.load_model("UNet2DConditionModel", source, subfolder="unet", dtype="bfloat16")
    assert len(shmload.segments()) == count
    del pipe
