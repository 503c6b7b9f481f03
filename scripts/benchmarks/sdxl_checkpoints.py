"""Make a pipeline of Stable Diffusion XL's classes as one file, for the benchmarks.

    python sdxl_checkpoints.py file DIRECTORY

The directory gets `model.safetensors`, in float16 and with the original names, and `config`, the
pipeline's directory without weights. The widths are those of SDXL. There are fewer blocks, so that
it fits beside its copies in 24 GiB: 1.5 of 3.5 billion parameters.
"""

import sys
from pathlib import Path
from typing import Any

_NOISE_STD = 0.02
_VOCABULARY_COUNT = 49_408


def _make_file(directory: Path) -> None:
    from benchmarks import single_files

    pipe = _make_pipeline()
    directory.mkdir()
    for name, component in pipe.components.items():
        folder = directory / "config" / name
        if hasattr(component, "parameters"):
            is_theirs = name.startswith("text_encoder")
            (component.config.save_pretrained if is_theirs else component.save_config)(folder)
        elif component is not None:
            component.save_pretrained(folder)
    pipe.save_config(directory / "config")
    single_files.write(pipe, directory / "model.safetensors")


def _make_pipeline() -> Any:
    import diffusers
    import torch
    import transformers

    from benchmarks.checkpoints import make_tokenizer

    tokenizer = make_tokenizer(_VOCABULARY_COUNT)
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    text = {token: getattr(tokenizer, token) for token in tokens} | {
        "vocab_size": _VOCABULARY_COUNT
    }
    first = transformers.CLIPTextConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        num_hidden_layers=12,
        projection_dim=768,
        **text,
    )
    second = transformers.CLIPTextConfig(
        hidden_act="gelu",
        hidden_size=1280,
        intermediate_size=5120,
        num_attention_heads=20,
        num_hidden_layers=16,  # of 32
        projection_dim=1280,
        **text,
    )
    with torch.device("meta"):
        models = {
            "unet": diffusers.UNet2DConditionModel(
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                attention_head_dim=(5, 10, 20),
                block_out_channels=(320, 640, 1280),
                cross_attention_dim=2048,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                projection_class_embeddings_input_dim=2816,
                sample_size=128,
                transformer_layers_per_block=(1, 2, 3),  # (1, 2, 10)
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                use_linear_projection=True,
            ),
            "vae": diffusers.AutoencoderKL(
                block_out_channels=(128, 256, 512, 512),
                down_block_types=("DownEncoderBlock2D",) * 4,
                layers_per_block=2,
                sample_size=1024,
                scaling_factor=0.13025,
                up_block_types=("UpDecoderBlock2D",) * 4,
            ),
            "text_encoder": transformers.CLIPTextModel(first),
            "text_encoder_2": transformers.CLIPTextModelWithProjection(second),
        }
    generator = torch.Generator("cpu").manual_seed(0)
    for name, model in models.items():
        models[name] = model.to(torch.float16).to_empty(device="cpu").eval()
        for parameter in models[name].parameters():
            parameter.data.normal_(0, _NOISE_STD, generator=generator)
    scheduler = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear")
    return diffusers.StableDiffusionXLPipeline(
        **models, tokenizer=tokenizer, tokenizer_2=tokenizer, scheduler=scheduler
    )


if __name__ == "__main__":
    _, given = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _make_file(Path(given))
