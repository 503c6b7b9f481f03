"""The well-known pipelines that placements are compared on, by name: their classes and components.

sd15             stable-diffusion-v1-5/stable-diffusion-v1-5
sdxl             stabilityai/stable-diffusion-xl-base-1.0, its variant fp16
sd3              stabilityai/stable-diffusion-3-medium-diffusers
flux-dev         black-forest-labs/FLUX.1-dev
wan21-14b        Wan-AI/Wan2.1-T2V-14B-Diffusers
wan22-a14b       Wan-AI/Wan2.2-T2V-A14B-Diffusers
qwen-image       Qwen/Qwen-Image
hunyuan-video    hunyuanvideo-community/HunyuanVideo
ltx-video        Lightricks/LTX-Video, its first version
"""

import torch

from benchmarks.published_models import (
    Model,
    clip_g,
    clip_l,
    llama_8b,
    qwen25_vl_7b,
    safety_checker,
    t5_xxl,
    umt5_xxl,
    vae,
    vae_16,
    wan_transformer,
)

Pipeline = tuple[str, dict[str, Model | tuple[str, str]]]
"""A class, and its components in their order: models, or library and class of the others."""

_CLIP_TOKENIZER = ("transformers", "CLIPTokenizer")
_T5_TOKENIZER = ("transformers", "T5TokenizerFast")
_FLOW_SCHEDULER = ("diffusers", "FlowMatchEulerDiscreteScheduler")

PIPELINES: dict[str, Pipeline] = {
    "sd15": (
        "StableDiffusionPipeline",
        {
            "feature_extractor": ("transformers", "CLIPImageProcessor"),
            "safety_checker": safety_checker(),
            "scheduler": ("diffusers", "PNDMScheduler"),
            "text_encoder": clip_l(torch.float32),
            "tokenizer": _CLIP_TOKENIZER,
            "unet": Model(
                "diffusers",
                "UNet2DConditionModel",
                860,
                torch.float32,
                {"attention_head_dim": 8, "cross_attention_dim": 768, "sample_size": 64},
            ),
            "vae": vae(torch.float32),
        },
    ),
    "sdxl": (
        "StableDiffusionXLPipeline",
        {
            "scheduler": ("diffusers", "EulerDiscreteScheduler"),
            "text_encoder": clip_l(torch.float16),
            "text_encoder_2": clip_g(torch.float16),
            "tokenizer": _CLIP_TOKENIZER,
            "tokenizer_2": _CLIP_TOKENIZER,
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
            "vae": vae(torch.float16, sample_size=1024, scaling_factor=0.13025),
        },
    ),
    "sd3": (
        "StableDiffusion3Pipeline",
        {
            "scheduler": _FLOW_SCHEDULER,
            "text_encoder": clip_l(torch.float16, projected=True),
            "text_encoder_2": clip_g(torch.float16),
            "text_encoder_3": t5_xxl(),
            "tokenizer": _CLIP_TOKENIZER,
            "tokenizer_2": _CLIP_TOKENIZER,
            "tokenizer_3": _T5_TOKENIZER,
            "transformer": Model(
                "diffusers",
                "SD3Transformer2DModel",
                2028,
                torch.float16,
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
            "vae": vae_16(scaling_factor=1.5305, shift_factor=0.0609),
        },
    ),
    "flux-dev": (
        "FluxPipeline",
        {
            "scheduler": _FLOW_SCHEDULER,
            "text_encoder": clip_l(torch.bfloat16),
            "text_encoder_2": t5_xxl(),
            "tokenizer": _CLIP_TOKENIZER,
            "tokenizer_2": _T5_TOKENIZER,
            "transformer": Model(
                "diffusers",
                "FluxTransformer2DModel",
                11901,
                torch.bfloat16,
                {"guidance_embeds": True},  # the class's defaults are FLUX.1-schnell's
            ),
            "vae": vae_16(scaling_factor=0.3611, shift_factor=0.1159),
        },
    ),
    "wan21-14b": (
        "WanPipeline",
        {
            "scheduler": ("diffusers", "UniPCMultistepScheduler"),
            "text_encoder": umt5_xxl(),
            "tokenizer": _T5_TOKENIZER,
            "transformer": wan_transformer(),
            "vae": Model("diffusers", "AutoencoderKLWan", 127, torch.float32),
        },
    ),
    "wan22-a14b": (
        "WanPipeline",
        {
            "scheduler": ("diffusers", "UniPCMultistepScheduler"),
            "text_encoder": umt5_xxl(),
            "tokenizer": _T5_TOKENIZER,
            "transformer": wan_transformer(),
            "transformer_2": wan_transformer(),
            "vae": Model("diffusers", "AutoencoderKLWan", 127, torch.float32),
        },
    ),
    "qwen-image": (
        "QwenImagePipeline",
        {
            "scheduler": _FLOW_SCHEDULER,
            "text_encoder": qwen25_vl_7b(),
            "tokenizer": ("transformers", "Qwen2Tokenizer"),
            "transformer": Model("diffusers", "QwenImageTransformer2DModel", 20430, torch.bfloat16),
            "vae": Model("diffusers", "AutoencoderKLQwenImage", 127, torch.bfloat16),
        },
    ),
    "hunyuan-video": (
        "HunyuanVideoPipeline",
        {
            "scheduler": _FLOW_SCHEDULER,
            "text_encoder": llama_8b(),
            "text_encoder_2": clip_l(torch.float16),
            "tokenizer": ("transformers", "LlamaTokenizerFast"),
            "tokenizer_2": _CLIP_TOKENIZER,
            "transformer": Model(
                "diffusers",
                "HunyuanVideoTransformer3DModel",
                12821,
                torch.bfloat16,
                {"guidance_embeds": True},
            ),
            "vae": Model("diffusers", "AutoencoderKLHunyuanVideo", 246, torch.float16),
        },
    ),
    "ltx-video": (
        "LTXPipeline",
        {
            "scheduler": _FLOW_SCHEDULER,
            "text_encoder": t5_xxl(),
            "tokenizer": _T5_TOKENIZER,
            "transformer": Model("diffusers", "LTXVideoTransformer3DModel", 1923, torch.bfloat16),
            "vae": Model("diffusers", "AutoencoderKLLTXVideo", 419, torch.bfloat16),
        },
    ),
}
