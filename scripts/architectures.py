"""Make pipelines with the configurations of well-known models and empty weight files.

    python scripts/architectures.py DIRECTORY [flux-dev ...]
    shmload plan DIRECTORY/flux-dev --inventory 2x24GiB

The weight files have real headers (names, shapes, dtypes) and sparse data: they take no room on the
disk, and any step that only reads headers works on them. The configurations are the ones that the
models' authors publish on the Hugging Face hub, reduced to what differs from the class's defaults:

    sd15          stable-diffusion-v1-5/stable-diffusion-v1-5        float32
    sdxl          stabilityai/stable-diffusion-xl-base-1.0           float16, its variant fp16
    flux-dev      black-forest-labs/FLUX.1-dev                       bfloat16
    wan21-14b     Wan-AI/Wan2.1-T2V-14B-Diffusers                    float32, text encoder bfloat16

They are written from memory of those files, not copied. To keep them true to the originals, the
number of parameters of every component is checked.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.stable_diffusion import safety_checker

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.formats.safetensors import build_header
from shmload._checkpoints.header import TensorSpec

_DTYPES = {
    getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
}


@dataclass(frozen=True, slots=True)
class Model:
    """One component."""

    library: str
    class_name: str
    parameters: int
    """Number of parameters of the published model, in millions."""
    dtype: torch.dtype
    config: dict[str, Any] = field(default_factory=dict)

    def make(self) -> torch.nn.Module:
        """Make the model on the meta device."""
        with torch.device("meta"):
            if self.library == "diffusers":
                return getattr(diffusers, self.class_name)(**self.config)
            home = safety_checker if self.library == "stable_diffusion" else transformers
            model_class = getattr(home, self.class_name)
            return model_class(model_class.config_class(**self.config))


def _clip_l(dtype: torch.dtype, parameters: int = 123) -> Model:
    """OpenAI's CLIP ViT-L/14, text half: the text encoder of all but Wan."""
    config = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
        "vocab_size": 49408,
    }
    return Model("transformers", "CLIPTextModel", parameters, dtype, config)


def _t5_xxl(kind: str, vocab_size: int, parameters: int) -> Model:
    """The encoder of T5 or UMT5, size XXL."""
    config = {
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "feed_forward_proj": "gated-gelu",
        "num_heads": 64,
        "num_layers": 24,
        "vocab_size": vocab_size,
    }
    return Model("transformers", f"{kind}EncoderModel", parameters, torch.bfloat16, config)


def _vae(dtype: torch.dtype, **config: Any) -> Model:
    levels = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    }
    return Model("diffusers", "AutoencoderKL", 84, dtype, levels | config)


Pipeline = tuple[str, dict[str, Model | tuple[str, str]]]

PIPELINES: dict[str, Pipeline] = {
    "sd15": (
        "StableDiffusionPipeline",
        {
            "feature_extractor": ("transformers", "CLIPImageProcessor"),
            "safety_checker": Model(
                "stable_diffusion",
                "StableDiffusionSafetyChecker",
                304,
                torch.float32,
                {
                    "projection_dim": 768,
                    "vision_config": {
                        "hidden_size": 1024,
                        "intermediate_size": 4096,
                        "num_attention_heads": 16,
                        "num_hidden_layers": 24,
                        "patch_size": 14,
                    },
                },
            ),
            "scheduler": ("diffusers", "PNDMScheduler"),
            "text_encoder": _clip_l(torch.float32),
            "tokenizer": ("transformers", "CLIPTokenizer"),
            "unet": Model(
                "diffusers",
                "UNet2DConditionModel",
                860,
                torch.float32,
                {"attention_head_dim": 8, "cross_attention_dim": 768, "sample_size": 64},
            ),
            "vae": _vae(torch.float32),
        },
    ),
    "sdxl": (
        "StableDiffusionXLPipeline",
        {
            "scheduler": ("diffusers", "EulerDiscreteScheduler"),
            "text_encoder": _clip_l(torch.float16),
            "text_encoder_2": Model(
                "transformers",
                "CLIPTextModelWithProjection",
                695,
                torch.float16,
                {
                    "hidden_act": "gelu",
                    "hidden_size": 1280,
                    "intermediate_size": 5120,
                    "num_attention_heads": 20,
                    "num_hidden_layers": 32,
                    "projection_dim": 1280,
                    "vocab_size": 49408,
                },
            ),
            "tokenizer": ("transformers", "CLIPTokenizer"),
            "tokenizer_2": ("transformers", "CLIPTokenizer"),
            "unet": Model(
                "diffusers",
                "UNet2DConditionModel",
                2567,
                torch.float16,
                {
                    "addition_embed_type": "text_time",
                    "addition_time_embed_dim": 256,
                    "attention_head_dim": (5, 10, 20),
                    "block_out_channels": (320, 640, 1280),
                    "cross_attention_dim": 2048,
                    "down_block_types": (
                        "DownBlock2D",
                        "CrossAttnDownBlock2D",
                        "CrossAttnDownBlock2D",
                    ),
                    "projection_class_embeddings_input_dim": 2816,
                    "sample_size": 128,
                    "transformer_layers_per_block": (1, 2, 10),
                    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                    "use_linear_projection": True,
                },
            ),
            "vae": _vae(torch.float16, sample_size=1024, scaling_factor=0.13025),
        },
    ),
    "flux-dev": (
        "FluxPipeline",
        {
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": _clip_l(torch.bfloat16),
            "text_encoder_2": _t5_xxl("T5", 32128, 4762),
            "tokenizer": ("transformers", "CLIPTokenizer"),
            "tokenizer_2": ("transformers", "T5TokenizerFast"),
            "transformer": Model(
                "diffusers",
                "FluxTransformer2DModel",
                11901,
                torch.bfloat16,
                {"guidance_embeds": True},  # the class's defaults are FLUX.1-schnell's
            ),
            "vae": _vae(
                torch.bfloat16,
                latent_channels=16,
                sample_size=1024,
                scaling_factor=0.3611,
                shift_factor=0.1159,
                use_post_quant_conv=False,
                use_quant_conv=False,
            ),
        },
    ),
    "wan21-14b": (
        "WanPipeline",
        {
            "scheduler": ("diffusers", "UniPCMultistepScheduler"),
            "text_encoder": _t5_xxl("UMT5", 256384, 5681),
            "tokenizer": ("transformers", "T5TokenizerFast"),
            "transformer": Model(
                "diffusers",
                "WanTransformer3DModel",
                14288,
                torch.float32,
                {
                    "attention_head_dim": 128,
                    "cross_attn_norm": True,
                    "eps": 1e-6,
                    "ffn_dim": 13824,
                    "freq_dim": 256,
                    "in_channels": 16,
                    "num_attention_heads": 40,
                    "num_layers": 40,
                    "out_channels": 16,
                    "patch_size": (1, 2, 2),
                    "qk_norm": "rms_norm_across_heads",
                    "text_dim": 4096,
                },
            ),
            "vae": Model("diffusers", "AutoencoderKLWan", 127, torch.float32),
        },
    ),
}


def save(name: str, root: Path) -> Path:
    """Write one of `PIPELINES` into a directory of its own, and return that."""
    pipeline_class, components = PIPELINES[name]
    folder = root / name
    index: dict[str, Any] = {"_class_name": pipeline_class}
    for component, entry in components.items():
        below = folder / component
        below.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, Model):
            index[component] = [entry.library, entry.class_name]
            _save_model(entry, below)
        else:
            index[component] = list(entry)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder


def _save_model(model: Model, folder: Path) -> None:
    made = model.make()
    millions = round(sum(parameter.numel() for parameter in made.parameters()) / 1e6)
    if millions != model.parameters:
        raise SystemExit(
            f"{folder} has {millions} million parameters instead of {model.parameters}"
        )
    is_diffusers = model.library == "diffusers"
    if is_diffusers:
        made.save_config(folder)
    else:
        made.config.dtype = model.dtype
        made.config.architectures = [model.class_name]
        made.config.save_pretrained(folder)
    base = "diffusion_pytorch_model" if is_diffusers else "model"
    specs = tuple(_specs(made, model.dtype))
    header = build_header(specs, {"format": "pt"}, 8)
    with open(folder / f"{base}.safetensors", "wb") as file:
        file.write(header)
        os.truncate(file.fileno(), len(header) + specs[-1].end)


def _specs(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[TensorSpec]:
    position = 0
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied: safetensors stores the first name only
            continue
        seen.add(id(tensor))
        stored = _DTYPES[dtype if tensor.is_floating_point() else tensor.dtype]
        nbytes = tensor.numel() * NBITS[stored] // 8
        yield TensorSpec(name, stored, tuple(tensor.shape), position, position + nbytes)
        position += nbytes


if __name__ == "__main__":
    for name in sys.argv[2:] or PIPELINES:
        print(save(name, Path(sys.argv[1])))
