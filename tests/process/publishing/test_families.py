"""Pipelines of all families, with adapters or blocks, come back and make the same pictures."""

import diffusers
import gguf
import gguf_models
import numpy as np
import pipelines
import pytest
import torch
from comparing import assert_equal
from gguf_files import KINDS, save_blocks
from lacking import skip_what_is_lacking, takes_adapters
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from pipelines import FAMILIES

import shmload

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.usefixtures("evicts"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]

_TARGETS = {"text_encoder": ["q_proj", "v_proj"]}


@pytest.fixture
def load(saved):
    """Load a pipeline whose weights are resident."""
    return lambda family, **given: shmload.load_pipeline(
        saved(family), keep=True, progress=False, **given
    )


@pytest.fixture(scope="module")
def lora_of(tmp_path_factory):
    """Return the folder of a LoRA for what denoises, and for the text encoder if it takes one."""
    made = {}

    def save(family):
        if family not in made:
            pipe = pipelines.build(family)
            names = [denoiser_of(pipe)]
            if takes_adapters() and family == "stable-diffusion":
                names.append("text_encoder")
            layers = {}
            for name in names:
                targets = _TARGETS.get(name, ["to_q", "to_v"])
                model = getattr(pipe, name)
                torch.manual_seed(0)
                model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
                layers[f"{name}_lora_layers"] = get_peft_model_state_dict(model)
            made[family] = tmp_path_factory.mktemp(family)
            type(pipe).save_lora_weights(made[family], **layers)
        return str(made[family])

    return save


def denoiser_of(pipe):
    return "unet" if hasattr(pipe, "unet") else "transformer"


def models_of(pipe):
    return [each for each in pipe.components.values() if isinstance(each, torch.nn.Module)]


def modes_of(pipe):
    return [module.training for model in models_of(pipe) for module in model.modules()]


def assert_comes_back(pipe, **given):
    """Publish and load a pipeline that has made a picture; compare all of it, and the next one."""
    pipelines.run(pipe, **given)
    got = shmload.load_pipeline(shmload.publish(pipe, "variant").source)
    assert modes_of(got) == modes_of(pipe)
    for model in (*models_of(got), *models_of(pipe)):
        model.eval()
    assert_equal(got, pipe)
    picture, wanted = (pipelines.run(each, **given) for each in (got, pipe))
    assert np.isfinite(wanted).all()
    assert np.array_equal(picture, wanted)
    return picture


@pytest.mark.parametrize("is_fused", [False, True], ids=["loaded", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora(load, lora_of, family, is_fused):
    pipe = load(family)
    plain = pipelines.run(pipe)
    pipe.load_lora_weights(lora_of(family), weight_name="pytorch_lora_weights.safetensors")
    if is_fused:
        pipe.fuse_lora(lora_scale=0.7)
        pipe.unload_lora_weights()
    assert not np.array_equal(assert_comes_back(pipe), plain)


@pytest.mark.parametrize("family", ["stable-diffusion", "flux"])
def test_blocks_of_a_gguf_file(load, saved, tmp_path, family):
    skip_what_is_lacking(f"{family} in GGUF")
    plain = load(family)
    name = denoiser_of(plain)
    save_as_blocks(getattr(plain, name), tmp_path / "model.gguf")
    model = shmload.load_model(
        type(getattr(plain, name)),
        tmp_path / "model.gguf",
        config=str(saved(family) / name),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        dtype=torch.float32,
        keep=True,
        progress=False,
    )
    picture = assert_comes_back(load(family, **{name: model}))
    wanted = pipelines.run(plain)
    assert not np.array_equal(picture, wanted)
    assert np.allclose(picture, wanted, atol=0.05)


def save_as_blocks(model, path):
    tensors = gguf_models.quantise(model, ["Q8_0"], rows=32)
    for name, (kind, shape, _) in tensors.items():
        if kind == "Q8_0":
            values = model.get_parameter(name).detach().numpy()
            tensors[name] = kind, shape, gguf.quantize(values, KINDS[kind])
    save_blocks(tensors, path)
