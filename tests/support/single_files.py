"""Write Stable Diffusion pipelines as one file, with the names of the original authors' code.

Stable Diffusion 1 and XL are known, and the transformer of Flux. The names are those of CompVis'
latent-diffusion, of open_clip, and of the code that came with Flux, by which the published files
are written.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Tensors = dict[str, Any]

# By part of a name, in the transformer of Flux.
_FLUX = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "single_transformer_blocks.": "single_blocks.",
    "transformer_blocks.": "double_blocks.",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "attn.to_add_out": "txt_attn.proj",
    "attn.to_out.0": "img_attn.proj",
    "norm1_context.linear": "txt_mod.lin",
    "norm1.linear": "img_mod.lin",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
}

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


def flux_transformer(model: Any) -> Tensors:
    """Return the tensors of Flux's transformer as its authors have them."""
    found = {}
    for name, tensor in _joined(model.state_dict(), "img_attn.qkv", "txt_attn.qkv").items():
        single = re.match(r"single_transformer_blocks\.\d+\.", name)
        theirs = name
        if single:
            rest = name[single.end() :]
            rest = rest.replace("attn.norm_q.weight", "norm.query_norm.scale")
            rest = rest.replace("attn.norm_k.weight", "norm.key_norm.scale")
            rest = rest.replace("proj_out", "linear2").replace("norm.linear", "modulation.lin")
            theirs = single[0] + rest
        else:
            theirs = theirs.replace("attn.norm_q.weight", "img_attn.norm.query_norm.scale")
            theirs = theirs.replace("attn.norm_k.weight", "img_attn.norm.key_norm.scale")
            theirs = theirs.replace("proj_out", "final_layer.linear")
        is_swapped = name.startswith("norm_out")
        found[_replaced(theirs, _FLUX)] = _swapped(tensor) if is_swapped else tensor
    return found


def _replaced(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def _swapped(tensor: Any) -> Any:
    """Put the second half first: one has scale and shift, the other shift and scale."""
    import torch

    return torch.cat(tensor.chunk(2)[::-1])


def _joined(tensors: Tensors, image: str, text: str) -> Tensors:
    """Join the projections of each attention into one tensor, as the original code has them."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        match = re.search(r"attn\.(?:to_([qkv])|add_([qkv])_proj)\.|\.proj_mlp\.", name)
        if not match:
            found[name] = tensor
            continue
        if name.startswith("single_") and "to_q" in name:
            last = name.rpartition(".")[2]
            block = name.partition(".attn.")[0]
            parts = [tensors[f"{block}.attn.to_{each}.{last}"] for each in "qkv"]
            found[f"{block}.linear1.{last}"] = torch.cat(
                [*parts, tensors[f"{block}.proj_mlp.{last}"]]
            )
        elif not name.startswith("single_") and "q" in (match[1], match[2]):
            end = match.group().replace("q", "{}", 1) if match[1] else "attn.add_{}_proj."
            parts = [tensors[name.replace(match.group(), end.format(each))] for each in "qkv"]
            where = image if match[1] else text
            found[name.replace(match.group(), f"{where}.")] = torch.cat(parts)
    return found


def write(pipe: Any, path: Path) -> Path:
    """Write a pipeline as one file, .safetensors or .ckpt, and return the path."""
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
