"""The checkpoints of the benchmarks, by name; their weights are seeded noise.

sd15-fp32, sd15-bf16            Stable Diffusion 1.5's classes and sizes
sd15-fp32-bin, sd15-bf16-bin    the same in PyTorch's files
small-fp32                      the same classes, tiny
sdxl-fp16-file                  Stable Diffusion XL with fewer blocks, as one file: 1.5 of 3.5
                                billion parameters, which fit beside their copies in 24 GiB
flux-8-fp32, flux-8-bf16        Flux's transformer with 8 double and 12 single blocks, or others
flux-small, flux-keys           the same class, tiny: with a block of each kind, and with 2,000
tensors-90000                   files with 7,500, 30,000 and 90,000 tensors of 1 KiB
flux-gguf-whole                 all of Flux's transformer as GGUF, by its authors' names, in Q4_K
flux-gguf, flux-gguf-small      two double and four single blocks of it; a tiny one

A directory of one file has the folder `config` beside it.
"""

import itertools
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TENSOR_COUNTS = (7_500, 30_000, 90_000)
FLUX_SMALL = {
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 4, 8),
    "in_channels": 4,
    "joint_attention_dim": 32,
    "num_attention_heads": 2,
    "num_layers": 1,
    "num_single_layers": 1,
    "pooled_projection_dim": 32,
}
"""Configuration of the small transformer."""
_GGUF_SMALL = {"num_attention_heads": 4, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
_NOISE_STD = 0.02
_TENSOR_NBYTES = 1024
_SHARD_NBYTES = 4_000_000_000
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
    if match := re.fullmatch(r"flux-(\d+)-(fp32|bf16)", name):
        blocks = int(match[1])
        config: dict[str, Any] = {"num_layers": blocks, "num_single_layers": blocks * 3 // 2}
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[match[2]]
        make_flux(folder, FLUX_SMALL if is_quick else config, dtype)
        return
    many = 2 if is_quick else 2_000
    one_each = {"num_layers": 1, "num_single_layers": 1}
    makers: dict[str, Callable[[], None]] = {
        "small-fp32": lambda: _save_tiny(folder),
        "sd15-fp32": lambda: _save_tiny(folder) if is_quick else _make_sd15(folder),
        "sd15-bf16": lambda: _make_bf16(folder, Path(work, f"sd15-fp32{ending}")),
        "sd15-fp32-bin": lambda: _make_bin(folder, Path(work, f"sd15-fp32{ending}")),
        "sd15-bf16-bin": lambda: _make_bin(folder, Path(work, f"sd15-bf16{ending}")),
        "sdxl-fp16-file": lambda: _save_file(_sdxl(is_quick=is_quick), folder),
        "flux-small": lambda: make_flux(folder, FLUX_SMALL, "bfloat16"),
        "flux-keys": lambda: make_flux(
            folder, FLUX_SMALL | {"num_layers": many, "num_single_layers": many}, "bfloat16"
        ),
        "tensors-90000": lambda: _make_tensors(folder),
        "flux-gguf-whole": lambda: _make_gguf(folder, one_each if is_quick else {}),
        "flux-gguf": lambda: _make_gguf(
            folder, one_each if is_quick else {"num_layers": 2, "num_single_layers": 4}
        ),
        "flux-gguf-small": lambda: _make_gguf(folder, one_each | _GGUF_SMALL),
    }
    makers[name]()


# Stable Diffusion ---------------------------------------------------------------------------------


def _make_sd15(directory: Path) -> None:
    import diffusers
    import transformers

    from benchmarks.published import PIPELINES

    pipe = diffusers.StableDiffusionPipeline(
        **{name: _filled(model.make()) for name, model in PIPELINES["sd15"].items()},
        tokenizer=_tokenizer(directory / "tokenizer"),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        feature_extractor=transformers.CLIPImageProcessor(),
    )
    _save(pipe, directory)


def _make_bf16(directory: Path, source: Path) -> None:
    import torch
    from diffusers import StableDiffusionPipeline

    _save(StableDiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16), directory)


def _make_bin(directory: Path, source: Path) -> None:
    import torch
    from safetensors.torch import load_file

    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in sorted(source.glob("*/*.safetensors")):
        name = path.stem if path.stem.startswith("diffusion_") else f"pytorch_{path.stem}"
        torch.save(load_file(path), directory / path.parent.name / f"{name}.bin")


def _save_tiny(directory: Path) -> None:
    import diffusers

    pipe = _tiny("stable-diffusion")
    # Of the same class as the large one's.
    pipe.scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    pipe.save_pretrained(directory)


def _tiny(family: str) -> Any:
    """Return one of the tests' pipelines."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    import pipelines

    return pipelines.build(family)


def _sdxl(*, is_quick: bool) -> Any:
    """Return a pipeline in float16."""
    import diffusers

    from benchmarks.published import PIPELINES

    if is_quick:
        return _tiny("sdxl").half()
    fewer: dict[str, dict[str, Any]] = {
        "text_encoder_2": {"num_hidden_layers": 16},  # of 32
        "unet": {"transformer_layers_per_block": (1, 2, 3)},  # (1, 2, 10)
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _tokenizer(Path(folder))
    return diffusers.StableDiffusionXLPipeline(
        **{
            part: _filled(model.make(**fewer.get(part, {})).half())
            for part, model in PIPELINES["sdxl"].items()
        },
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
    )


def _save_file(pipe: Any, directory: Path) -> None:
    """Save a pipeline as one file, and its directory without weights."""
    from benchmarks import single_files

    config = directory / "config"
    pipe.save_pretrained(config)
    for path in [*config.rglob("*.safetensors"), *config.rglob("*.index.json")]:
        path.unlink()
    single_files.write(pipe, directory / "model.safetensors")


def _filled(model: Any) -> Any:
    """Fill a model of the meta device; it is only saved, so other buffers may hold anything."""
    import torch

    generator = torch.Generator("cpu").manual_seed(0)
    filled = model.to_empty(device="cpu").eval()
    for parameter in filled.parameters():
        parameter.data.normal_(0, _NOISE_STD, generator=generator)
    return filled


def _save(pipe: Any, directory: Path) -> None:
    """Save a pipeline in the layout of the hub: the tokenizer as vocabulary and merges.

    `save_pretrained` writes one `tokenizer.json` instead, which takes five times as long to load
    (0.15 s against 0.03 s with transformers 5.23). Stable Diffusion 1.5's repositories do not have
    it.
    """
    pipe.save_pretrained(directory)
    shutil.rmtree(directory / "tokenizer")
    _tokenizer(directory / "tokenizer")


def _tokenizer(folder: Path) -> Any:
    """Write and read a byte-level BPE tokenizer of CLIP's kind: its size, made-up words."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    from benchmarks.published import CLIP_WORDS

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*symbols, *(f"{symbol}</w>" for symbol in symbols)]
    specials = ("<|startoftext|>", "<|endoftext|>")
    merges = list(itertools.islice(_merges(), CLIP_WORDS - len(pieces) - len(specials)))
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


def _merges() -> Iterator[tuple[str, str]]:
    """Yield pairs of existing pieces; each pair makes a new piece."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [left + right for left in letters for right in letters]
    for suffix in ("", "</w>"):
        yield from ((left, right + suffix) for left in letters for right in letters)
    for suffix in ("", "</w>"):
        yield from ((pair, right + suffix) for pair in pairs for right in letters)
    yield from ((left, right) for left in pairs for right in pairs)


# Tensors, Flux, GGUF ------------------------------------------------------------------------------


def _make_tensors(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    generator = torch.Generator("cpu").manual_seed(0)
    for count in TENSOR_COUNTS:
        tensors = {
            f"model.layers.{number // 10}.block.{number % 10}.weight": torch.randn(
                _TENSOR_NBYTES // 4, generator=generator
            )
            for number in range(count)
        }
        save_file(tensors, directory / f"{count}.safetensors", {"format": "pt"})


def make_flux(
    directory: Path, config: dict[str, Any], dtype: str, shard_nbytes: int = _SHARD_NBYTES
) -> None:
    """Make a pipeline whose only model is a transformer of Flux's class.

    Args:
        directory: where to write.
        config: of the transformer, where it differs from Flux.1-dev.
        dtype: of the weights: `float32` or `bfloat16`.
        shard_nbytes: size limit of a shard; memory holds one shard.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = FluxTransformer2DModel(**{"guidance_embeds": True, **config})
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipe = FluxPipeline(scheduler=scheduler, transformer=model, **dict.fromkeys(absent, None))
    pipe.save_config(directory)
    scheduler.save_pretrained(directory / "scheduler")
    folder = directory / "transformer"
    model.save_config(folder)
    tensors = model.to(getattr(torch, dtype)).state_dict()
    seeds = {name: seed for seed, name in enumerate(tensors)}

    def noise(name: str) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(seeds[name])
        values = torch.empty(tensors[name].shape).normal_(0, _NOISE_STD, generator=generator)
        return values.to(tensors[name].dtype)

    shards = split_torch_state_dict_into_shards(
        tensors,
        filename_pattern="diffusion_pytorch_model{suffix}.safetensors",
        max_shard_size=shard_nbytes,
    )
    with ThreadPoolExecutor() as pool:
        for file, names in shards.filename_to_tensors.items():
            made = dict(zip(names, pool.map(noise, names), strict=True))
            save_file(made, folder / file, {"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def _make_gguf(directory: Path, config: dict[str, Any]) -> None:
    """Make matrices of random blocks of Q4_K, and the rest in float32 and float16."""
    import gguf
    import numpy as np
    import torch
    from diffusers import FluxTransformer2DModel

    from benchmarks.single_files import flux_transformer

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
