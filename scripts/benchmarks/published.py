"""The well-known pipelines that placements are compared on: their models, on the meta device.

sd15             stable-diffusion-v1-5/stable-diffusion-v1-5
sdxl             stabilityai/stable-diffusion-xl-base-1.0, its variant fp16
sd3              stabilityai/stable-diffusion-3-medium-diffusers
flux-dev         black-forest-labs/FLUX.1-dev
wan21-14b        Wan-AI/Wan2.1-T2V-14B-Diffusers
wan22-a14b       Wan-AI/Wan2.2-T2V-A14B-Diffusers
qwen-image       Qwen/Qwen-Image
hunyuan-video    hunyuanvideo-community/HunyuanVideo
ltx-video        Lightricks/LTX-Video, its first version

The configurations are the ones that the models' authors publish on the Hugging Face hub, reduced to
what differs from the class's defaults. They are written from memory of those files, not copied; a
test compares each model with the published number of parameters.
"""

from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

CLIP_WORDS = 49_408
"""Entries of the vocabulary of CLIP's tokenizer."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model."""

    model_class: Any
    parameters: int
    """Number of parameters of the published model, in millions."""
    config: dict[str, Any] = field(default_factory=dict)

    def make(self, **changes: Any) -> torch.nn.Module:
        """Make the model on the meta device, with these changes of its configuration."""
        config = self.config | changes
        with torch.device("meta"):
            if hasattr(self.model_class, "config_class"):
                return self.model_class(self.model_class.config_class(**config))
            return self.model_class(**config)


def _clip_l(*, projected: bool = False) -> Model:
    """OpenAI's CLIP ViT-L/14, text half."""
    config = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
        "vocab_size": CLIP_WORDS,
    }
    if projected:
        return Model(transformers.CLIPTextModelWithProjection, 124, config)
    return Model(transformers.CLIPTextModel, 123, config)


def _clip_g() -> Model:
    """OpenCLIP's ViT-bigG/14, text half: the second text encoder of SDXL and SD3."""
    config = {
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "projection_dim": 1280,
        "vocab_size": CLIP_WORDS,
    }
    return Model(transformers.CLIPTextModelWithProjection, 695, config)


def _t5_xxl() -> Model:
    """The encoder of T5 1.1, size XXL."""
    return Model(transformers.T5EncoderModel, 4762, _t5_config(32128))


def _umt5_xxl() -> Model:
    """The encoder of UMT5, size XXL: the text encoder of Wan."""
    return Model(transformers.UMT5EncoderModel, 5681, _t5_config(256384))


def _t5_config(vocab_size: int) -> dict[str, Any]:
    return {
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "feed_forward_proj": "gated-gelu",
        "num_heads": 64,
        "num_layers": 24,
        "vocab_size": vocab_size,
    }


def _llama_8b() -> Model:
    """Llama 3 8B without its head, as HunyuanVideo has it: 64 more tokens for images."""
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128320,
    }
    return Model(transformers.LlamaModel, 7505, config)


def _qwen25_vl_7b() -> Model:
    """Qwen2.5-VL 7B: the text encoder of Qwen-Image."""
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "vocab_size": 152064,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    }
    return Model(
        transformers.Qwen2_5_VLForConditionalGeneration,
        8292,
        {"text_config": text, "vision_config": vision, "tie_word_embeddings": False},
    )


def _safety_checker() -> Model:
    """CLIP ViT-L/14, image half: the safety checker of Stable Diffusion 1."""
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    }
    config = {"projection_dim": 768, "vision_config": vision}
    return Model(StableDiffusionSafetyChecker, 304, config)


def _vae(**config: Any) -> Model:
    """The autoencoder of Stable Diffusion and of those after it."""
    levels = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    }
    return Model(diffusers.AutoencoderKL, 84, levels | config)


def _vae_16(**config: Any) -> Model:
    """The same with 16 latent channels, as SD3 and Flux have it."""
    flow = {
        "latent_channels": 16,
        "sample_size": 1024,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    }
    return _vae(**flow, **config)


def _wan_transformer() -> Model:
    """The transformer of Wan 2.1 14B, and each of the two of Wan 2.2 A14B."""
    config = {
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
    }
    return Model(diffusers.WanTransformer3DModel, 14288, config)


PIPELINES: dict[str, dict[str, Model]] = {
    "sd15": {
        "safety_checker": _safety_checker(),
        "text_encoder": _clip_l(),
        "unet": Model(
            diffusers.UNet2DConditionModel,
            860,
            {"attention_head_dim": 8, "cross_attention_dim": 768, "sample_size": 64},
        ),
        "vae": _vae(),
    },
    "sdxl": {
        "text_encoder": _clip_l(),
        "text_encoder_2": _clip_g(),
        "unet": Model(
            diffusers.UNet2DConditionModel,
            2567,
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
        "vae": _vae(sample_size=1024, scaling_factor=0.13025),
    },
    "sd3": {
        "text_encoder": _clip_l(projected=True),
        "text_encoder_2": _clip_g(),
        "text_encoder_3": _t5_xxl(),
        "transformer": Model(
            diffusers.SD3Transformer2DModel,
            2028,
            {
                "attention_head_dim": 64,
                "caption_projection_dim": 1536,
                "joint_attention_dim": 4096,
                "num_attention_heads": 24,
                "num_layers": 24,
                "pooled_projection_dim": 2048,
                "pos_embed_max_size": 192,
            },
        ),
        "vae": _vae_16(scaling_factor=1.5305, shift_factor=0.0609),
    },
    "flux-dev": {
        "text_encoder": _clip_l(),
        "text_encoder_2": _t5_xxl(),
        "transformer": Model(
            diffusers.FluxTransformer2DModel,
            11901,
            {"guidance_embeds": True},  # the class's defaults are FLUX.1-schnell's
        ),
        "vae": _vae_16(scaling_factor=0.3611, shift_factor=0.1159),
    },
    "wan21-14b": {
        "text_encoder": _umt5_xxl(),
        "transformer": _wan_transformer(),
        "vae": Model(diffusers.AutoencoderKLWan, 127),
    },
    "wan22-a14b": {
        "text_encoder": _umt5_xxl(),
        "transformer": _wan_transformer(),
        "transformer_2": _wan_transformer(),
        "vae": Model(diffusers.AutoencoderKLWan, 127),
    },
    "qwen-image": {
        "text_encoder": _qwen25_vl_7b(),
        "transformer": Model(diffusers.QwenImageTransformer2DModel, 20430),
        "vae": Model(diffusers.AutoencoderKLQwenImage, 127),
    },
    "hunyuan-video": {
        "text_encoder": _llama_8b(),
        "text_encoder_2": _clip_l(),
        "transformer": Model(
            diffusers.HunyuanVideoTransformer3DModel,
            12821,
            {"guidance_embeds": True},
        ),
        "vae": Model(diffusers.AutoencoderKLHunyuanVideo, 246),
    },
    "ltx-video": {
        "text_encoder": _t5_xxl(),
        "transformer": Model(diffusers.LTXVideoTransformer3DModel, 1923),
        "vae": Model(diffusers.AutoencoderKLLTXVideo, 419),
    },
}
"""Models by component, by the names above."""
