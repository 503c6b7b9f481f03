"""The libraries' own functions that end in a load: shared under `redirect`, or it says why not."""

import types

import diffusers
import peft
import pytest
import single_files
import torch
import transformers
from diffusers.pipelines import pipeline_utils
from redirecting import assert_same
from safetensors.torch import load_file

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_IS_NEW = hasattr(pipeline_utils, "_resolve_dtype")
_BF16 = torch.bfloat16
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def sources(saved, tmp_path_factory):
    """Directories of models: `bert`, `llama`, `adapter` (of llama), `clip` and so on."""
    root = tmp_path_factory.mktemp("entries")
    torch.manual_seed(0)
    small = _SMALL | {"num_attention_heads": 2, "vocab_size": 600}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    models = {
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**small)),
        "llama": llama,
        "adapter": peft.get_peft_model(
            transformers.LlamaForCausalLM(llama.config),
            peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        ),
    }
    models["adapter"].peft_config["default"].base_model_name_or_path = str(root / "llama")
    for name, model in models.items():
        model.save_pretrained(root / name)
    sd = saved("stable-diffusion")
    file = root / "sd.safetensors"
    single_files.write(diffusers.StableDiffusionPipeline.from_pretrained(sd), file)
    return types.SimpleNamespace(
        **{name: str(root / name) for name in models},
        clip=str(sd / "text_encoder"),
        tokens=str(sd / "tokenizer"),
        sd=str(sd),
        flux=str(saved("flux")),
        file=str(file),
    )


def _pipeline(task, model, tokens, **given):
    return transformers.pipeline(task, model=model, tokenizer=tokens, **given).model


def _modular(at):
    if not _IS_NEW:
        pytest.skip("it reads no ordinary pipelines")
    pipe = diffusers.ModularPipeline.from_pretrained(at.flux)
    pipe.load_components(torch_dtype=_BF16)
    return pipe.transformer


def _image_to_image(at):
    pipe = diffusers.DiffusionPipeline.from_pretrained(at.sd, torch_dtype=_BF16)
    return diffusers.AutoPipelineForImage2Image.from_pipe(pipe)


_S, _L = "shmload", "library"
ENTRIES = {
    # a function that loads, and the way of each call that it ends in
    "pipeline": (
        lambda at: _pipeline("feature-extraction", at.clip, at.tokens, dtype=_BF16, device=-1),
        [_S],
    ),
    "pipeline, map": (
        lambda at: _pipeline("text-generation", at.llama, at.tokens, device_map="auto"),
        [_L],
    ),
    "pipeline of an adapter": (
        lambda at: _pipeline("text-generation", at.adapter, at.tokens),
        [_S],
    ),
    "peft, automatic": (
        lambda at: peft.AutoPeftModelForCausalLM.from_pretrained(at.adapter, dtype=_BF16),
        [_S],
    ),
    "from_pipe": (_image_to_image, [_S]),
    "modular": (_modular, [_S] * 4),
    "single file": (
        lambda at: diffusers.StableDiffusionImg2ImgPipeline.from_single_file(
            at.file, config=at.sd, safety_checker=None, torch_dtype=torch.float16
        ),
        [_S],
    ),
    "model of a single file": (
        lambda at: diffusers.UNet2DConditionModel.from_single_file(
            at.file, config=at.sd, subfolder="unet"
        ),
        [_S],
    ),
    "model of a dict": (
        lambda at: diffusers.UNet2DConditionModel.from_single_file(
            load_file(at.file), config=at.sd, subfolder="unet"
        ),
        [_L],
    ),
}


def _in_use(made):
    """Return a model as a pipeline would use it: some functions return it in training mode."""
    return made.eval() if isinstance(made, torch.nn.Module) else made


@pytest.mark.parametrize(("load", "wanted"), ENTRIES.values(), ids=ENTRIES)
def test_entry_of_the_libraries(sources, ways, load, wanted):
    made = assert_same(lambda: _in_use(load(sources)), ways, are_texts_same=False)
    assert made is not None
    assert ways.taken == wanted, ways.lines


def test_configuration_that_quantises_is_left_to_the_library(sources, ways):
    config = transformers.BertConfig.from_pretrained(sources.bert)
    config.quantization_config = {"quant_method": "no such"}
    assert_same(lambda: transformers.BertModel.from_pretrained(sources.bert, config=config), ways)
    assert ways.taken == [_L]


def test_changed_configuration_counts_and_stays_as_it_was(sources, ways):
    config = transformers.BertConfig.from_pretrained(sources.bert, num_hidden_layers=1)
    before = config.to_dict()
    for dtype in (None, _BF16):
        made = assert_same(
            lambda dtype=dtype: transformers.BertModel.from_pretrained(
                sources.bert, config=config, dtype=dtype
            ),
            ways,
        )
        assert len(made.encoder.layer) == 1
    assert ways.taken == [_S, _S], ways.lines
    assert config.to_dict() == before
