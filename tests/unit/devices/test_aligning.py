"""Adapters around modules that wait go to the device of their model; what waits does not."""

import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from devices import LateDevice
from torch import nn

from shmload._devices.aligning import ModelHook, WaitingHook, add_hook
from shmload._devices.waiting import Waiting


class Adapted(nn.Module):
    """A layer with an adapter around it, as peft's."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(4, 4, bias=False)


@pytest.fixture
def model():
    """A block and a layer that wait, with an adapter in the one and one around the other."""
    model = nn.Module()
    model.block = nn.Sequential(nn.Linear(4, 4))
    model.layer = nn.Linear(4, 4)
    waiting = Waiting(LateDevice())
    for root in (model.block, model.layer):
        for module in root.modules():
            if module is root or module._parameters:
                add_hook(module, WaitingHook(torch.device("cpu"), waiting, root))
    model.block[0] = Adapted(model.block[0])
    model.layer = Adapted(model.layer)
    model.forward = lambda inputs: inputs
    add_hook(model, ModelHook(torch.device("meta")))
    return model


def test_adapter_in_no_block_goes_to_the_device(model):
    model(torch.ones(1))
    assert model.layer.down.weight.is_meta
    assert model.layer.base.weight.is_cpu
    assert model.block[0].down.weight.is_cpu
    assert model.block[0].base.weight.is_cpu


def test_hooks_that_others_added_do_not_hide_a_block(model):
    add_hook(model.block, ModelHook(torch.device("meta")))
    model(torch.ones(1))
    assert model.block[0].base.weight.is_cpu


def test_removed_hooks_leave_ordinary_modules(model):
    remove_hook_from_module(model, recurse=True)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    layer = model.layer.base
    assert layer.forward.__func__ is nn.Linear.forward
