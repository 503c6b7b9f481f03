"""Tiny pipelines of the real classes, with seeded weights in which no two tensors are alike.

Fresh models are full of ones and zeros, which hide a missing cast or a swapped tensor. Here every
stored float tensor carries noise, so that bfloat16 and float16 both round it and each tensor
differs from every other.

    pipe = build("wan")                                  # float32, on the CPU
    source = save("flux", tmp_path, dtype="bfloat16", variant="bf16", sharded=True)
    image = run(FluxPipeline.from_pretrained(source))    # one short generation, as an array
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import diffusers
import numpy as np
import torch
import transformers
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from tokenizers_tiny import clip_tokenizer, qwen2_tokenizer, t5_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NOISE_STD = 0.02
# Shards of the largest model of a pipeline; packing is greedy, so there may be one or two more.
_SHARDS = 4
_SHORT = {"prompt": "a cat, the red dog", "height": 16, "width": 16, "num_inference_steps": 2}
# Configuration keys that all text and vision encoders except T5 share.
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
_FLOW_VAE = {"shift_factor": 0.0609, "use_post_quant_conv": False, "use_quant_conv": False}

Components = dict[str, Any]
Maker = Callable[[], Components]


@dataclass(frozen=True, slots=True)
class _Recipe:
    class_name: str
    make: Maker
    call: dict[str, Any]


_RECIPES: dict[str, _Recipe] = {}


def _recipe(family: str, class_name: str, **call: Any) -> Callable[[Maker], Maker]:
    """Register a function that makes a family's components, and its shortest call's arguments."""

    def register(make: Maker) -> Maker:
        _RECIPES[family] = _Recipe(class_name, make, call)
        return make

    return register


def build(family: str, seed: int = 0) -> diffusers.DiffusionPipeline:
    """Make a pipeline in float32 on the CPU; equal seeds give equal bits.

    Args:
        family: One of `FAMILIES`.
        seed: Decides every weight. The global random state is left as it was.
    """
    recipe = _RECIPES[family]
    # Some layers draw their first weights from the global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        components = recipe.make()
    for name, model in _models(components).items():
        _add_noise(model.eval(), seed=zlib.crc32(f"{seed}/{name}".encode()))
    return getattr(diffusers, recipe.class_name)(**components)


def save(
    family: str,
    directory: Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    variant: str | None = None,
    sharded: bool = False,
    seed: int = 0,
) -> Path:
    """Write a pipeline as its library does, and return the directory.

    Args:
        family: One of `FAMILIES`.
        directory: Where to write. It is made if missing.
        dtype: Dtype of every weight, including weights that the library keeps in float32 on load.
        variant: Part of the weight files' names, as in "model.fp16.safetensors".
        sharded: Split each model of some size into 2 to 6 shards, with an index.
        seed: As in `build`.
    """
    pipe = build(family, seed).to(getattr(torch, dtype))
    models = _models(pipe.components).values()
    largest = max(sum(parameter.nbytes for parameter in model.parameters()) for model in models)
    limit = {"max_shard_size": largest // _SHARDS} if sharded else {}
    pipe.save_pretrained(directory, safe_serialization=True, variant=variant, **limit)
    return directory


def run(pipe: diffusers.DiffusionPipeline, seed: int = 0, **given: Any) -> np.ndarray:
    """Generate once, with the least work; results of equal pipelines are equal.

    Args:
        pipe: A pipeline of one of `FAMILIES`, on any device and in any dtype it can compute in.
        seed: Decides the noise that the generation starts from.
        given: Further arguments of the call.

    Returns:
        The images or the frames, shape (1, [frames,] height, width, 3), float32.
    """
    recipe = next(each for each in _RECIPES.values() if each.class_name == type(pipe).__name__)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    threads = torch.get_num_threads()
    # One thread: on a busy machine two take 50 times as long, as each tiny operation waits for
    # both.
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            result = pipe(generator=generator, output_type="np", **recipe.call, **given)
    finally:
        torch.set_num_threads(threads)
    return result.frames if hasattr(result, "frames") else result.images


def _models(components: Components) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}


def _add_noise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    seen = set()
    for tensor in model.state_dict().values():
        # Tied weights appear once for each of their names.
        if tensor.is_floating_point() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensor.add_(torch.empty_like(tensor).normal_(0, _NOISE_STD, generator=generator))


def _clip_text(tokenizer: PreTrainedTokenizerBase, *, projected: bool = False) -> PreTrainedModel:
    config = transformers.CLIPTextConfig(
        **_ENCODER,
        projection_dim=32,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    name = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return getattr(transformers, name)(config)


def _t5(tokenizer: PreTrainedTokenizerBase, family: str = "T5") -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(
        d_ff=64,
        d_kv=8,
        d_model=64,
        feed_forward_proj="gated-gelu",
        num_heads=2,
        num_layers=2,
        vocab_size=len(tokenizer),
    )
    return getattr(transformers, f"{family}EncoderModel")(config)


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = _ENCODER | {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "num_key_value_heads": 1,
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
        "vocab_size": len(tokenizer),
    }
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision["out_hidden_size"] = 32
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _vae(**settings: Any) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        **settings,
    )


def _unet(**settings: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=8,
        **settings,
    )


@_recipe("stable-diffusion", "StableDiffusionPipeline", **_SHORT)
def _stable_diffusion() -> Components:
    tokenizer = clip_tokenizer()
    checker = transformers.CLIPConfig(
        text_config={"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 8},  # the vision half only
        vision_config=_ENCODER | {"image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    return {
        "feature_extractor": transformers.CLIPImageProcessor(size=16, crop_size=16),
        "safety_checker": StableDiffusionSafetyChecker(checker),
        "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        "text_encoder": _clip_text(tokenizer),
        "tokenizer": tokenizer,
        "unet": _unet(
            attention_head_dim=4,
            cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        "vae": _vae(),
    }


@_recipe("sdxl", "StableDiffusionXLPipeline", **_SHORT)
def _sdxl() -> Components:
    tokenizer, tokenizer_2 = clip_tokenizer(), clip_tokenizer(pad_token="!")
    return {
        "scheduler": diffusers.EulerDiscreteScheduler(steps_offset=1, timestep_spacing="leading"),
        "text_encoder": _clip_text(tokenizer),
        "text_encoder_2": _clip_text(tokenizer_2, projected=True),
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer_2,
        "unet": _unet(
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            attention_head_dim=(2, 4),
            cross_attention_dim=2 * 32,  # both text encoders, side by side
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            projection_class_embeddings_input_dim=32 + 6 * 8,  # pooled text and six sizes
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            use_linear_projection=True,
        ),
        "vae": _vae(force_upcast=False),
    }


@_recipe("sd3", "StableDiffusion3Pipeline", **_SHORT, max_sequence_length=32)
def _sd3() -> Components:
    tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": _clip_text(tokenizer, projected=True),
        "text_encoder_2": _clip_text(tokenizer, projected=True),
        "text_encoder_3": _t5(tokenizer_3),
        "tokenizer": tokenizer,
        "tokenizer_2": clip_tokenizer(pad_token="!"),
        "tokenizer_3": tokenizer_3,
        "transformer": diffusers.SD3Transformer2DModel(
            attention_head_dim=16,
            caption_projection_dim=32,
            in_channels=4,
            joint_attention_dim=64,
            num_attention_heads=2,
            num_layers=2,
            out_channels=4,
            pooled_projection_dim=2 * 32,  # both CLIP encoders, side by side
            pos_embed_max_size=16,
            sample_size=8,
        ),
        "vae": _vae(**_FLOW_VAE),
    }


@_recipe("flux", "FluxPipeline", **_SHORT, max_sequence_length=32)
def _flux() -> Components:
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "text_encoder": _clip_text(tokenizer),
        "text_encoder_2": _t5(tokenizer_2),
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer_2,
        "transformer": diffusers.FluxTransformer2DModel(
            attention_head_dim=16,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
            in_channels=4 * 4,  # the pipeline packs squares of four latents
            joint_attention_dim=64,
            num_attention_heads=2,
            num_layers=1,
            num_single_layers=2,
            pooled_projection_dim=32,
        ),
        "vae": _vae(**_FLOW_VAE),
    }


@_recipe("wan", "WanPipeline", **_SHORT, max_sequence_length=32, num_frames=5)
def _wan() -> Components:
    tokenizer = t5_tokenizer()
    return {
        "scheduler": diffusers.UniPCMultistepScheduler(
            flow_shift=3.0, prediction_type="flow_prediction", use_flow_sigmas=True
        ),
        "text_encoder": _t5(tokenizer, "UMT5"),
        "tokenizer": tokenizer,
        "transformer": diffusers.WanTransformer3DModel(
            attention_head_dim=12,
            ffn_dim=64,
            freq_dim=32,
            num_attention_heads=2,
            num_layers=2,
            rope_max_seq_len=64,  # else each load computes a table of 1024 rows, for 0.05 s
            text_dim=64,
        ),
        "vae": diffusers.AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
    }


@_recipe("qwen-image", "QwenImagePipeline", **_SHORT, true_cfg_scale=1)
def _qwen_image() -> Components:
    tokenizer = qwen2_tokenizer()
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "text_encoder": _qwen2_5_vl(tokenizer),
        "tokenizer": tokenizer,
        "transformer": diffusers.QwenImageTransformer2DModel(
            attention_head_dim=16,
            axes_dims_rope=(8, 4, 4),
            in_channels=16 * 4,
            joint_attention_dim=32,
            num_attention_heads=2,
            num_layers=2,
        ),
        "vae": diffusers.AutoencoderKLQwenImage(
            base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1
        ),
    }


# Listing names does not import the pipelines; getting an attribute would.
FAMILIES: tuple[str, ...] = tuple(
    family for family, recipe in _RECIPES.items() if recipe.class_name in dir(diffusers)
)


def save_with_large_tensors(folder: Path, width: int) -> Path:
    """Save a pipeline of one UNet; returns its folder.

    With a width of 256 it has 50 MB in bfloat16, and tensors of megabytes.
    """
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(folder)
    return folder
