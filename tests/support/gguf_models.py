"""Small transformers and their weights as a GGUF file has them."""

import diffusers
import torch
from gguf_files import random_blocks

# Rows of at least 256 elements, as the K kinds need them.
MODELS = {
    "FluxTransformer2DModel": {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "joint_attention_dim": 256,
        "pooled_projection_dim": 256,
        "axes_dims_rope": [16, 24, 24],
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 64,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 256,
        "freq_dim": 256,
        "ffn_dim": 512,
        "num_layers": 1,
    },
    "UNet2DConditionModel": {
        "block_out_channels": (256, 256),
        "layers_per_block": 1,
        "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 256,
    },
}


def build(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(diffusers, name)(**MODELS[name]).eval()


def quantise(model, kinds):
    """Return a model's weights: those of linear layers of random blocks, in turn of each kind."""
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.in_features % 256 == 0
    }
    found = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        shape = tuple(tensor.shape)
        if name in linear:
            kind = kinds[number % len(kinds)]
            found[name] = (kind, shape, _blocks(tensor, kind, shape, number))
        elif tensor.ndim > 1:
            found[name] = ("F16", shape, tensor.half().numpy())
        else:
            found[name] = ("F32", shape, tensor.float().numpy())
    return found


def _blocks(tensor, kind, shape, seed):
    if kind == "BF16":
        return tensor.bfloat16().view(torch.uint8).numpy()
    return random_blocks(kind, shape, seed)
