"""Small adapters for pipelines."""

import torch

TOKENS = 4
EMBEDDING = 16
"""Width of the embedding of an image, of which an IP-adapter makes tokens."""


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ip_adapter_of(unet):
    """Return the two state dicts of an IP-Adapter, which has numbers for a UNet's layers."""
    width = unet.config.cross_attention_dim
    image = {"proj.weight": noise(TOKENS * width, EMBEDDING), "proj.bias": noise(TOKENS * width)}
    image |= {"norm.weight": noise(width), "norm.bias": noise(width)}
    names = [each for each in unet.attn_processors if each.endswith("attn2.processor")]
    attention = {}
    for number, name in enumerate(names):
        layer = unet.get_submodule(name.removesuffix(".processor")).to_k
        shape = layer.out_features, width
        attention[f"{2 * number + 1}.to_k_ip.weight"] = noise(*shape)
        attention[f"{2 * number + 1}.to_v_ip.weight"] = noise(*shape) * 2
    return {"image_proj": image, "ip_adapter": attention}
