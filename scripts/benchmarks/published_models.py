"""Well-known models on the meta device: the components of the published pipelines.

The configurations are the ones that the models' authors publish on the Hugging Face hub, reduced to
what differs from the class's defaults. They are written from memory of those files, not copied. To
keep them true to the originals, every model is checked for the published number of parameters.
"""

from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.stable_diffusion import safety_checker as checker


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
        """Make the model on the meta device.

        Raises:
            ValueError: it has another number of parameters than the published one.
        """
        with torch.device("meta"):
            made = self._make()
        millions = round(sum(parameter.numel() for parameter in made.parameters()) / 1e6)
        if millions != self.parameters:
            raise ValueError(
                f"{self.class_name} has {millions} million parameters instead of {self.parameters}"
            )
        return made

    def _make(self) -> torch.nn.Module:
        if self.library == "diffusers":
            return getattr(diffusers, self.class_name)(**self.config)
        home = checker if self.library == "stable_diffusion" else transformers
        model_class = getattr(home, self.class_name)
        return model_class(model_class.config_class(**self.config))


def clip_l(dtype: torch.dtype, *, projected: bool = False) -> Model:
    """OpenAI's CLIP ViT-L/14, text half."""
    config = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
        "vocab_size": 49408,
    }
    class_name = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return Model("transformers", class_name, 124 if projected else 123, dtype, config)


def clip_g(dtype: torch.dtype) -> Model:
    """OpenCLIP's ViT-bigG/14, text half: the second text encoder of SDXL and SD3."""
    config = {
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "projection_dim": 1280,
        "vocab_size": 49408,
    }
    return Model("transformers", "CLIPTextModelWithProjection", 695, dtype, config)


def t5_xxl() -> Model:
    """The encoder of T5 1.1, size XXL."""
    return Model("transformers", "T5EncoderModel", 4762, torch.bfloat16, _t5_config(32128))


def umt5_xxl() -> Model:
    """The encoder of UMT5, size XXL: the text encoder of Wan."""
    return Model("transformers", "UMT5EncoderModel", 5681, torch.bfloat16, _t5_config(256384))


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


def llama_8b() -> Model:
    """Llama 3 8B without its head, as HunyuanVideo has it: 64 more tokens for images."""
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128320,
    }
    return Model("transformers", "LlamaModel", 7505, torch.float16, config)


def qwen25_vl_7b() -> Model:
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
        "transformers",
        "Qwen2_5_VLForConditionalGeneration",
        8292,
        torch.bfloat16,
        {"text_config": text, "vision_config": vision, "tie_word_embeddings": False},
    )


def safety_checker() -> Model:
    """CLIP ViT-L/14, image half: the safety checker of Stable Diffusion 1."""
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    }
    config = {"projection_dim": 768, "vision_config": vision}
    name = "StableDiffusionSafetyChecker"
    return Model("stable_diffusion", name, 304, torch.float32, config)


def vae(dtype: torch.dtype, **config: Any) -> Model:
    """The autoencoder of Stable Diffusion and of those after it."""
    levels = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    }
    return Model("diffusers", "AutoencoderKL", 84, dtype, levels | config)


def vae_16(**config: Any) -> Model:
    """The same with 16 latent channels, as SD3 and Flux have it."""
    flow = {
        "latent_channels": 16,
        "sample_size": 1024,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    }
    return vae(torch.bfloat16, **flow, **config)


def wan_transformer() -> Model:
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
    return Model("diffusers", "WanTransformer3DModel", 14288, torch.float32, config)
