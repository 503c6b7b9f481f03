"""Write Stable Diffusion pipelines as one file, with the names of the original authors' code.

    python single_files.py PIPELINE FILE      FILE ends in .safetensors or .ckpt

Stable Diffusion 1 and XL are known. The names are those of CompVis' latent-diffusion and of
open_clip, by which the published files are written.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Tensors = dict[str, Any]

_UNET_PREFIX = "model.diffusion_model."
_VAE_PREFIX = "first_stage_model."
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
_OPEN_CLIP = {
    "text_model.encoder.layers": "transformer.resblocks",
    "text_model.final_layer_norm": "ln_final",
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn": "attn",
}


def as_one_file(pipe: Any) -> Tensors:
    """Return a pipeline's weights under their original names; tensors are joined as there."""
    found = {
        **{
            _UNET_PREFIX + _name_in_unet(name, pipe.unet.config): tensor
            for name, tensor in pipe.unet.state_dict().items()
        },
        **dict(_vae_tensors(pipe.vae)),
    }
    first = pipe.text_encoder.state_dict()
    if getattr(pipe, "text_encoder_2", None) is None:
        return found | _clip_tensors(first, "cond_stage_model.transformer.")
    second = pipe.text_encoder_2.state_dict()
    found |= _clip_tensors(first, "conditioner.embedders.0.transformer.")
    return found | dict(_open_clip_tensors(second, "conditioner.embedders.1.model."))


def write(pipe: Any, path: Path) -> Path:
    """Write a pipeline as one file, and return the path."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in as_one_file(pipe).items()}
    if path.suffix == ".ckpt":
        torch.save({"state_dict": tensors, "global_step": 1}, path)
    else:
        save_file(tensors, path)
    return path


def _name_in_unet(name: str, config: Any) -> str:
    for ours, theirs in _UNET_ENDS.items():
        if name.startswith(f"{ours}."):
            return name.replace(ours, theirs, 1)
    if match := re.match(r"mid_block\.(resnets|attentions)\.(\d+)\.", name):
        place = 2 * int(match[2]) + (match[1] == "attentions")
        return f"middle_block.{place}.{_in_resnet(name[match.end() :], match[1])}"
    match = re.match(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.", name)
    assert match, name
    side, level, kind, layer = match[1], int(match[2]), match[3], int(match[4])
    per_level = config.layers_per_block + 1
    rest = name[match.end() :]
    if kind == "downsamplers":
        return f"input_blocks.{(level + 1) * per_level}.0.{rest.replace('conv', 'op', 1)}"
    if kind == "upsamplers":
        has_attention = "CrossAttn" in config.up_block_types[level]
        return f"output_blocks.{(level + 1) * per_level - 1}.{1 + has_attention}.{rest}"
    block = f"input_blocks.{1 + level * per_level + layer}"
    if side == "up":
        block = f"output_blocks.{level * per_level + layer}"
    return f"{block}.{int(kind == 'attentions')}.{_in_resnet(rest, kind)}"


def _in_resnet(rest: str, kind: str) -> str:
    module, _, last = rest.rpartition(".")
    return f"{_RESNET[module]}.{last}" if kind == "resnets" else rest


def _vae_tensors(vae: Any) -> Iterator[tuple[str, Any]]:
    last = len(vae.config.block_out_channels) - 1
    for name, tensor in vae.state_dict().items():
        theirs = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        theirs = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", theirs)
        theirs = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", theirs)
        theirs = re.sub(
            r"up_blocks\.(\d+)\.resnets", lambda m: f"up.{last - int(m[1])}.block", theirs
        )
        theirs = re.sub(
            r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{last - int(m[1])}.upsample", theirs
        )
        theirs = re.sub(
            r"mid_block\.resnets\.(\d+)", lambda m: f"mid.block_{int(m[1]) + 1}", theirs
        )
        if "mid_block.attentions.0." in theirs:
            theirs = theirs.replace("mid_block.attentions.0.", "mid.attn_1.")
            for ours, original in _VAE_ATTENTION.items():
                theirs = theirs.replace(f".{ours}.", f".{original}.")
            if tensor.ndim == 2:  # a convolution of size 1 there
                tensor = tensor[:, :, None, None]
        yield _VAE_PREFIX + theirs, tensor


def _clip_tensors(tensors: Tensors, prefix: str) -> Tensors:
    # transformers 5 has no `text_model` in its names, the files have.
    bare = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    return {f"{prefix}text_model.{name}": tensor for name, tensor in bare.items()}


def _open_clip_tensors(tensors: Tensors, prefix: str) -> Iterator[tuple[str, Any]]:
    import torch

    for name, tensor in tensors.items():
        if name == "text_projection.weight":
            yield f"{prefix}text_projection", tensor.T
            continue
        theirs = name
        for ours, original in _OPEN_CLIP.items():
            theirs = theirs.replace(ours, original)
        if match := re.search(r"\.[qkv]_proj\.(weight|bias)$", theirs):
            if ".q_proj." in theirs:
                parts = [tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
                yield f"{prefix}{theirs[: match.start()]}.in_proj_{match[1]}", torch.cat(parts)
            continue
        yield prefix + theirs, tensor


def main() -> None:
    """Write the pipeline and the file that the command line names."""
    from diffusers import DiffusionPipeline

    source, path = sys.argv[1:]
    write(DiffusionPipeline.from_pretrained(source), Path(path))


if __name__ == "__main__":
    main()
