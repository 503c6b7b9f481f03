"""The checkpoints of the benchmarks, by name; their weights are seeded noise.

sd15-fp32, sd15-bf16            Stable Diffusion 1.5's classes and sizes
sd15-fp32-bin                   the same in PyTorch's files
small-fp32                      the same classes, tiny
sd15-fp32-file                  the same as one file, without the safety checker
small-file                      a tiny one
flux-8-fp32, flux-8-bf16        Flux's transformer with 8 double and 12 single blocks
flux-small                      the same class, tiny
flux-gguf                       all of Flux's transformer as GGUF, by its authors' names, in Q4_K
flux-gguf-small                 a tiny one

A directory of one file has the folder `config` beside it.
"""

import itertools
import json
import math
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# The pipelines, models and names that the tests have too.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

_FLUX_SMALL = {
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 4, 8),
    "in_channels": 4,
    "joint_attention_dim": 32,
    "num_attention_heads": 2,
    "pooled_projection_dim": 32,
}
_GGUF_SMALL = {"num_attention_heads": 4, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
_CLIP_WORDS = 49_408
_NOISE_STD = 0.02
_K_ELEMENTS = 256


def make(name: str, directory: str, work: str) -> None:
    """Make a checkpoint; a tiny one if the directory's name has `quick`.

    Args:
        name: one of the names above.
        directory: where to write; its name begins with that of the checkpoint.
        work: has the checkpoints that this one is made from, their names ending in the same way.
    """
    folder = Path(directory)
    ending = folder.name.removeprefix(name)
    is_quick = "quick" in ending
    fp32 = Path(work, f"sd15-fp32{ending}")
    large = _FLUX_SMALL | _blocks(1, 1) if is_quick else _blocks(8, 12)
    makers = {
        "small-fp32": lambda: _save_tiny(folder),
        "sd15-fp32": lambda: _save_tiny(folder) if is_quick else _make_sd15(folder),
        "sd15-bf16": lambda: _make_bf16(folder, fp32),
        "sd15-fp32-bin": lambda: _make_bin(folder, fp32),
        "sd15-fp32-file": lambda: _make_file(folder, fp32),
        "small-file": lambda: _make_file(folder, Path(work, f"small-fp32{ending}")),
        "flux-8-fp32": lambda: _make_flux(folder, large, "float32"),
        "flux-8-bf16": lambda: _make_flux(folder, large, "bfloat16"),
        "flux-small": lambda: _make_flux(folder, _FLUX_SMALL | _blocks(1, 1), "bfloat16"),
        "flux-gguf": lambda: _make_gguf(folder, _blocks(1, 1) if is_quick else {}),
        "flux-gguf-small": lambda: _make_gguf(folder, _blocks(1, 1) | _GGUF_SMALL),
    }
    makers[name]()


def _blocks(double: int, single: int) -> dict[str, Any]:
    return {"num_layers": double, "num_single_layers": single}


# Stable Diffusion ---------------------------------------------------------------------------------


def _make_sd15(directory: Path) -> None:
    import diffusers
    import transformers
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker

    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    vision |= {"num_hidden_layers": 24, "patch_size": 14}
    text = transformers.CLIPTextConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        num_hidden_layers=12,
        projection_dim=768,
        vocab_size=_CLIP_WORDS,
    )
    checker = transformers.CLIPConfig(projection_dim=768, vision_config=vision)
    pipe = diffusers.StableDiffusionPipeline(
        unet=_filled(
            diffusers.UNet2DConditionModel,
            attention_head_dim=8,
            cross_attention_dim=768,
            sample_size=64,
        ),
        vae=_filled(
            diffusers.AutoencoderKL,
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
        ),
        text_encoder=_filled(transformers.CLIPTextModel, text),
        safety_checker=_filled(StableDiffusionSafetyChecker, checker),
        tokenizer=_tokenizer(directory / "tokenizer"),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        feature_extractor=transformers.CLIPImageProcessor(),
    )
    pipe.save_pretrained(directory)
    # `save_pretrained` writes one `tokenizer.json` instead of vocabulary and merges, which takes
    # five times as long to load. Stable Diffusion 1.5's repositories do not have it.
    shutil.rmtree(directory / "tokenizer")
    _tokenizer(directory / "tokenizer")


def _filled(model_class: Any, *arguments: Any, **config: Any) -> Any:
    """Make a model with noise; it is only saved, so other buffers may hold anything."""
    import torch

    with torch.device("meta"):
        model = model_class(*arguments, **config)
    filled = model.to_empty(device="cpu").eval()

    def fill(seed: int, parameter: torch.Tensor) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        parameter.data.normal_(0, _NOISE_STD, generator=generator)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, itertools.count(), filled.parameters()))
    return filled


def _make_bf16(directory: Path, source: Path) -> None:
    import torch
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)
    pipe.save_pretrained(directory)
    shutil.rmtree(directory / "tokenizer")
    shutil.copytree(source / "tokenizer", directory / "tokenizer")


def _make_bin(directory: Path, source: Path) -> None:
    import torch
    from safetensors.torch import load_file

    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in sorted(source.glob("*/*.safetensors")):
        name = path.stem if path.stem.startswith("diffusion_") else f"pytorch_{path.stem}"
        torch.save(load_file(path), directory / path.parent.name / f"{name}.bin")


def _save_tiny(directory: Path) -> None:
    import diffusers
    import pipelines

    pipe = pipelines.build("stable-diffusion")
    # Of the same class as the large one's.
    pipe.scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    pipe.save_pretrained(directory)


def _make_file(directory: Path, source: Path) -> None:
    """Save a pipeline as one file, and its directory without weights."""
    import single_files
    from diffusers import StableDiffusionPipeline

    shutil.copytree(
        source, directory / "config", ignore=shutil.ignore_patterns("*.safetensors", "safety_*")
    )
    pipe = StableDiffusionPipeline.from_pretrained(
        source, safety_checker=None, requires_safety_checker=False
    )
    pipe.save_config(directory / "config")
    single_files.write(pipe, directory / "model.safetensors")


def _tokenizer(folder: Path) -> Any:
    """Write and read a byte-level BPE tokenizer of CLIP's kind: its size, made-up words."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*symbols, *(f"{symbol}</w>" for symbol in symbols)]
    specials = ("<|startoftext|>", "<|endoftext|>")
    merges = list(itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2))
    pairs = [left + right for left, right in merges]
    merges += itertools.product(pairs, repeat=2)
    merges = merges[: _CLIP_WORDS - len(pieces) - len(specials)]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: number for number, piece in enumerate((*pieces, *specials))}
    lines = ("#version: 0.2", *(f"{left} {right}" for left, right in merges), "")
    config = {
        "model_max_length": 77,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": "<|endoftext|>",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return CLIPTokenizer.from_pretrained(folder)


# Flux, GGUF ------------------------------------------------------------------------------


def _make_flux(directory: Path, config: dict[str, Any], dtype: str) -> None:
    """Make a pipeline whose only model is a transformer of Flux's class.

    Args:
        directory: where to write.
        config: of the transformer, where it differs from Flux.1-dev.
        dtype: of the weights: `float32` or `bfloat16`.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    model = _filled(FluxTransformer2DModel, guidance_embeds=True, **config)
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=model.to(getattr(torch, dtype)),
        **dict.fromkeys(absent),
    )
    pipe.save_pretrained(directory)


def _make_gguf(directory: Path, config: dict[str, Any]) -> None:
    """Make matrices of random blocks of Q4_K, and the rest in float32 and float16."""
    import gguf
    import numpy as np
    import torch
    from diffusers import FluxTransformer2DModel
    from single_files import flux_transformer

    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=False, **config)
    model.save_config(directory / "config")
    # Only Flux's own sizes have its authors' names: diffusers splits their tensors by these.
    is_whole_width = "num_attention_heads" not in config
    tensors = flux_transformer(model) if is_whole_width else model.state_dict()
    writer = gguf.GGUFWriter(directory / "model.gguf", "flux", use_temp_file=False)
    generator = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_K
    for name, shape in ((name, tuple(tensor.shape)) for name, tensor in tensors.items()):
        if len(shape) > 1 and shape[-1] % _K_ELEMENTS == 0:
            blocks = math.prod(shape) // _K_ELEMENTS
            content = generator.integers(0, 256, (blocks, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
            content[:, 1:4:2] &= 0x1F  # scales below 0.01
            writer.add_tensor(name, content.reshape(*shape[:-1], -1), raw_dtype=kind)
        else:
            dtype = np.float32 if len(shape) == 1 else np.float16
            writer.add_tensor(name, generator.normal(0, _NOISE_STD, shape).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
