"""Make the Stable Diffusion pipelines and the files of many tensors for the benchmarks.

    python checkpoints.py sd15 DIRECTORY      Stable Diffusion 1.5's real classes and sizes, float32
    python checkpoints.py sd15-bf16 DIRECTORY FLOAT32_DIRECTORY
    python checkpoints.py bin DIRECTORY OTHER_DIRECTORY    another one, in PyTorch's files
    python checkpoints.py small DIRECTORY     the same classes, about 1 MB
    python checkpoints.py tensors DIRECTORY COUNT...       files with COUNT tensors of 1 KiB

The weights are seeded noise; no step of a load depends on their values.
"""

import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NOISE_STD = 0.02
_VOCABULARY_COUNT = 49_408  # of Stable Diffusion 1.5's tokenizer
_SMALL_VOCABULARY_COUNT = 600
_TENSOR_NBYTES = 1024

Models = dict[str, Any]


def _make_sd15(directory: Path) -> None:
    # Sizes of huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5: 859.5, 83.7, 123.1 and
    # 304.0 million parameters.
    sizes: Models = {
        "unet": {"sample_size": 64, "cross_attention_dim": 768},
        "vae": {
            "block_out_channels": (128, 256, 512, 512),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "layers_per_block": 2,
            "sample_size": 512,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
        },
        "text": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "projection_dim": 768,
            "vocab_size": _VOCABULARY_COUNT,
        },
        "vision": {
            "hidden_size": 1024,
            "image_size": 224,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
        },
    }
    _save(_make_pipeline(sizes), directory, _VOCABULARY_COUNT)


def _make_sd15_bf16(directory: Path, source: str) -> None:
    import torch
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)
    _save(pipe, directory, _VOCABULARY_COUNT)


def _make_bin(directory: Path, source: str) -> None:
    import torch
    from safetensors.torch import load_file

    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in sorted(Path(source).glob("*/*.safetensors")):
        name = path.stem if path.stem.startswith("diffusion_") else f"pytorch_{path.stem}"
        torch.save(load_file(path), directory / path.parent.name / f"{name}.bin")


def _make_small(directory: Path) -> None:
    sizes: Models = {
        "unet": {
            "block_out_channels": (16, 32),
            "cross_attention_dim": 32,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "sample_size": 8,
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        "vae": {"block_out_channels": (8,), "norm_num_groups": 4, "sample_size": 16},
        "text": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "projection_dim": 32,
            "vocab_size": _SMALL_VOCABULARY_COUNT,
        },
        "vision": {
            "hidden_size": 32,
            "image_size": 28,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "projection_dim": 32,
        },
    }
    _save(_make_pipeline(sizes), directory, _SMALL_VOCABULARY_COUNT)


def _make_pipeline(sizes: Models) -> Any:
    import diffusers
    import torch
    import transformers
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    tokenizer = make_tokenizer(sizes["text"]["vocab_size"])
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    text = sizes["text"] | {token: getattr(tokenizer, token) for token in tokens}
    vision = sizes["vision"]
    vision_size = vision["image_size"]
    with torch.device("meta"):
        models: Models = {
            "unet": diffusers.UNet2DConditionModel(**sizes["unet"]),
            "vae": diffusers.AutoencoderKL(**sizes["vae"]),
            "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(**text)),
            "safety_checker": StableDiffusionSafetyChecker(
                transformers.CLIPConfig(
                    text_config=text,
                    vision_config=vision,
                    projection_dim=vision["projection_dim"],
                )
            ),
        }
    generator = torch.Generator("cpu").manual_seed(0)
    for name, model in models.items():
        # Non-persistent buffers stay uninitialised: the model is only saved.
        models[name] = model.to_empty(device="cpu").eval()
        for parameter in models[name].parameters():
            parameter.data.normal_(0, _NOISE_STD, generator=generator)
    return diffusers.StableDiffusionPipeline(
        **models,
        tokenizer=tokenizer,
        scheduler=diffusers.PNDMScheduler(
            beta_end=0.012,
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            skip_prk_steps=True,
            steps_offset=1,
        ),
        feature_extractor=transformers.CLIPImageProcessor(
            crop_size={"height": vision_size, "width": vision_size},
            size={"shortest_edge": vision_size},
        ),
    )


def _save(pipe: Any, directory: Path, vocabulary_count: int) -> None:
    """Save a pipeline in the layout of the hub: the tokenizer as vocabulary and merges.

    `save_pretrained` writes one `tokenizer.json` instead, which takes five times as long to load
    (0.15 s against 0.03 s with transformers 5.23). Stable Diffusion 1.5's repositories do not have
    it.
    """
    pipe.save_pretrained(directory)
    folder = directory / "tokenizer"
    shutil.rmtree(folder)
    _write_tokenizer(folder, vocabulary_count)


def make_tokenizer(count: int) -> Any:  # transformers has no types
    """Return a tokenizer of CLIP's kind with `count` entries."""
    from transformers import CLIPTokenizer

    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as directory:
        folder = Path(directory, "tokenizer")
        _write_tokenizer(folder, count)
        return CLIPTokenizer.from_pretrained(folder)


def _write_tokenizer(folder: Path, count: int) -> None:
    """Write a byte-level BPE tokenizer with `count` entries: the real size, made-up words."""
    from tokenizers import pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*symbols, *(f"{symbol}</w>" for symbol in symbols)]
    specials = ("<|startoftext|>", "<|endoftext|>")
    merges = list(itertools.islice(_merges(), count - len(pieces) - len(specials)))
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: number for number, piece in enumerate((*pieces, *specials))}
    lines = ("#version: 0.2", *(f"{left} {right}" for left, right in merges), "")
    config = {
        "model_max_length": 77,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": "<|endoftext|>",
    }
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _merges() -> Iterator[tuple[str, str]]:
    """Yield pairs of existing pieces; each pair makes a new piece."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [left + right for left in letters for right in letters]
    for suffix in ("", "</w>"):
        yield from ((left, right + suffix) for left in letters for right in letters)
    for suffix in ("", "</w>"):
        yield from ((pair, right + suffix) for pair in pairs for right in letters)
    yield from ((left, right) for left in pairs for right in pairs)


def _make_tensors(directory: Path, *counts: str) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    generator = torch.Generator("cpu").manual_seed(0)
    for count in map(int, counts):
        tensors = {
            f"model.layers.{number // 10}.block.{number % 10}.weight": torch.randn(
                _TENSOR_NBYTES // 4, generator=generator
            )
            for number in range(count)
        }
        save_file(tensors, directory / f"{count}.safetensors", {"format": "pt"})


_MAKERS: dict[str, Callable[..., None]] = {
    "sd15": _make_sd15,
    "sd15-bf16": _make_sd15_bf16,
    "bin": _make_bin,
    "small": _make_small,
    "tensors": _make_tensors,
}

if __name__ == "__main__":
    kind, directory, *arguments = sys.argv[1:]
    _MAKERS[kind](Path(directory), *arguments)
