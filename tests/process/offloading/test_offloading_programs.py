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
