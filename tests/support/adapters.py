"""Small adapters for pipelines."""

import peft
import torch
from safetensors.torch import save_file

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


def save_lora(model, path, target="to_q", seed=0):
    """Save a LoRA for what denoises, as diffusers does, and return its file."""
    torch.manual_seed(seed)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
    part = "unet" if "UNet" in type(model).__name__ else "transformer"
    state = peft.get_peft_model_state_dict(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{part}.{key}": each.contiguous() for key, each in state.items()}, path)
    return path
