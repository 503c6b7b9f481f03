"""Programs that offload: what they loaded by, what they change, and what happens meanwhile."""

import gguf_models
import pytest
import stand_in
from gguf_files import save_blocks
from lacking import skip_what_is_lacking

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(bool(stand_in.why_none()), reason=stand_in.why_none()),
]

# Each makes `models`.
DOORS = {
    "load_model": """
from transformers import CLIPTextModel
models = [shmload.load_model(
    CLIPTextModel, SOURCE, subfolder="text_encoder", keep=True, progress=False)]
""",
    "redirect": """
with shmload.redirect(keep=True):
    models = o.models(diffusers.DiffusionPipeline.from_pretrained(SOURCE)).values()
""",
    "components": """
models = o.models(diffusers.StableDiffusionPipeline(**o.load(SOURCE).components)).values()
""",
}
BEGIN = """
import diffusers, shmload, threading
SOURCE = sys.argv[1]
def require_home(models):
    for model in models:
        wanted = {key: each.clone() for key, each in model.state_dict().items()}
        for _ in range(2):
            model.to(o.DEVICE)
            model.to("cpu")
            assert not o.outside(model), o.outside(model)[:9]
            found = model.state_dict()
            assert all(torch.equal(found[key], each) for key, each in wanted.items())
"""


@pytest.mark.parametrize("door", DOORS)
def test_weights_come_home_whatever_loaded_them(offloading, saved, door):
    offloading(saved("stable-diffusion"), f"{BEGIN}{DOORS[door]}require_home(models)")


@pytest.mark.parametrize("family", ["sd3", "wan"])
def test_tied_weights_stay_tied(offloading, saved, family):
    offloading(
        saved(family),
        f"""{BEGIN}
pipe = o.load(SOURCE)
require_home(o.models(pipe).values())
tied = [each for each in o.models(pipe).values() if hasattr(each, "shared")]
assert tied
for model in tied:
    encoder = model.encoder.embed_tokens.weight
    assert encoder.data_ptr() == model.shared.weight.data_ptr()
""",
    )


def test_blocks_of_a_gguf_file_come_home(offloading, tmp_path):
    model = gguf_models.build("FluxTransformer2DModel")
    model.save_config(tmp_path / "config")
    save_blocks(gguf_models.quantise(model, ["Q4_K", "Q8_0"]), tmp_path / "model.gguf")
    offloading(
        tmp_path,
        f"""{BEGIN}
quantised = diffusers.GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
model = shmload.load_model(
    diffusers.FluxTransformer2DModel, SOURCE + "/model.gguf", config=SOURCE + "/config",
    quantization_config=quantised, dtype="bfloat16", keep=True, progress=False)
kinds = {{type(each).__name__ for each in model.parameters()}}
assert "GGUFParameter" in kinds
before = o.outside(model)
model.to(o.DEVICE)
assert all(hasattr(each, "quant_type") for each in model.parameters()
           if type(each).__name__ == "GGUFParameter")
model.to("cpu")
assert o.outside(model) == before
assert {{type(each).__name__ for each in model.parameters()}} == kinds
""",
    )


@pytest.mark.parametrize("call", ["streams-leaves", "streams-little-leaves"])
def test_weights_that_a_stream_brings_from_elsewhere_are_not_updated(offloading, saved, call):
    skip_what_is_lacking(call)
    offloading(
        saved("stable-diffusion"),
        f"""{BEGIN}
pipe = o.load(SOURCE)
begin, run = o.CALLS["{call}"]
begin(pipe)
try:
    shmload.update(pipe, SOURCE)
except shmload.PublicationError as exc:
    assert "an offloading call has the weights of" in str(exc)
else:
    raise AssertionError("updated")
""",
    )


def test_fused_lora_comes_back_and_the_rest_comes_home(offloading, saved):
    offloading(
        saved("stable-diffusion"),
        f"""{BEGIN}
from peft import LoraConfig
pipe = o.load(SOURCE)
whole = len(list(pipe.unet.parameters()))
pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
pipe.unet.fuse_lora()
wanted = {{key: each.clone() for key, each in pipe.unet.state_dict().items()}}
for _ in range(2):
    pipe.unet.to(o.DEVICE)
    pipe.unet.to("cpu")
    found = pipe.unet.state_dict()
    assert all(torch.equal(found[key], each) for key, each in wanted.items())
    private = o.outside(pipe.unet)
    assert private and all("to_q" in name for name in private), private
pipe.unet.unfuse_lora()
pipe.unet.unload_lora()
pipe.unet.to(o.DEVICE)
pipe.unet.to("cpu")
assert all("to_q" in name for name in o.outside(pipe.unet))
""",
    )


def test_result_on_a_device_is_not_kept(offloading, saved):
    offloading(
        saved("stable-diffusion"),
        f"""{BEGIN}
from pathlib import Path
from shmload._building.keys import key_of
from shmload._building.remembered import once
def make(number, device):
    key = key_of((Path(sys.argv[1]),), dict(number=number))
    return once(key, lambda _: torch.nn.Linear(2, 2).to(device), keep=True)
for _ in range(2):
    torch.manual_seed(0)
    assert make(0, o.DEVICE).weight.device.type == "standin"
(segment,) = shmload.segments()
assert segment.kept == "nothing: its weights are on a device"
""",
    )


def test_segment_is_in_use_once_its_weights_came_home(offloading, saved):
    offloading(
        saved("stable-diffusion"),
        f"""{BEGIN}
pipe = o.load(SOURCE)
require_home(o.models(pipe).values())
pipe.to(o.DEVICE)
try:
    shmload.evict(SOURCE)
except shmload.SegmentBusy:
    pass
else:
    raise AssertionError("evicted")
pipe.to("cpu")
assert not o.all_outside(pipe)
""",
    )
