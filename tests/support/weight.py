"""Makes a checkpoint of one weight, and checks the values of a load."""

import torch
from safetensors.torch import save_file

VALUES = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3))


def save_weight(path, values=VALUES):
    save_file({"weight": values}, path)
    return path


def assert_right(state):
    assert torch.equal(state["weight"], VALUES.bfloat16())
