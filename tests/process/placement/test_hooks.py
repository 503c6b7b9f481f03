"""Activations follow the weights from device to device, on pretended devices and real ones."""

from pathlib import Path

import pipelines
import pytest
import torch
import transformers
from torch import nn

import shmload

pytestmark = pytest.mark.libraries

# Torch's private backend with tensors that have a device and no bytes: operations across devices
# fail as on GPUs. It runs in a child, because a registered backend stays registered.
PRETEND = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
import pipelines
from accelerated import call_flux
from shmload._placement.inventory import parse_inventory
from shmload._placement.placement import place
from shmload._devices.hooks import attach_hooks, device_at
from shmload._building.module_trees import component_of
_setup_privateuseone_for_python_backend("fakegpu")
inventory = parse_inventory("fakegpu:0=1GiB,fakegpu:1=1GiB")
def run(component, device_map, has_hooks):
    model = getattr(pipelines.build("flux"), component)
    placement = place([component_of("model", model)], {"model": device_map}, inventory)
    where = placement.components["model"]
    where = {"": where} if isinstance(where, str) else where
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        move(mode, model, where)
        if has_hooks:
            attach_hooks(model, where, placement.execution_devices["model"])
        try:
            return str(ask(component, model).device)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}".replace("\\n", " ")
def move(mode, model, where):
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    device = device_at(where, f"{path}.{name}".lstrip("."), "cpu")
                    moved = mode.from_tensor(tensor.detach()).to(device)
                    is_buffer = tensors is module._buffers
                    tensors[name] = moved if is_buffer else nn.Parameter(moved, False)
def ask(component, model):
    if component == "transformer":
        return call_flux(model)
    return model(torch.ones(1, 7, dtype=torch.long))[0]
for line in sys.stdin:
    print("OUTPUT", run(*eval(line)), flush=True)
"""
_FIND_PIPELINES = f"import sys\nsys.path.append({str(Path(pipelines.__file__).parent)!r})\n"
_TEXT_BLOCK = (
    "text_model.encoder.layers.1" if transformers.__version__ < "5" else "encoder.layers.1"
)
_CASES = [
    ("text_encoder_2", 1, True),
    ("text_encoder_2", {"": 0, "encoder.block.1": 1}, True),
    ("text_encoder", {"": 0, _TEXT_BLOCK: 1}, True),
    ("transformer", {"": 0, "single_transformer_blocks": 1}, True),
    ("transformer", {"": 1, "transformer_blocks.0": 0}, True),
]


@pytest.fixture
def pretend(child):
    """Return a function that runs a model on pretended devices and returns its output's device."""
    pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no private backend written in Python")
    process = child(_FIND_PIPELINES + PRETEND)

    def ask(*case):
        process.say(repr(case))
        return process.expect("OUTPUT")

    return ask


@pytest.mark.slow
def test_outputs_come_back_to_where_inputs_were(pretend):
    # One process for all cases: its imports take longer than they do.
    assert {repr(case): pretend(*case) for case in _CASES} == dict.fromkeys(
        map(repr, _CASES), "cpu"
    )
    without = pretend("transformer", {"": 0, "single_transformer_blocks": 1}, False)
    assert without.partition(":")[0] not in ("cpu", "fakegpu")


# Real devices -------------------------------------------------------------------------------------


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2
    )
    return transformers.T5EncoderModel(config).eval()


class Table(nn.Module):
    """A module with a parameter of its own and a submodule."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(4.0))
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(inputs + self.table)


def test_weights_with_a_class_of_their_own_do_not_wait(accelerators):
    class Quantised(nn.Parameter):
        pass

    model = Table()
    model.layer.weight = Quantised(model.layer.weight.detach())
    before = model.table.data_ptr()
    with pytest.raises(shmload.ArgumentError, match="Table has weights of a class of their own"):
        shmload.to_device(model, {"": 0, "layer": "offload"})
    assert model.table.data_ptr() == before


def test_meta_and_cpu(encoder):
    before = encoder.shared.weight.data_ptr()
    shmload.to_device(encoder, {"": "cpu", "encoder.block.2": "meta"})
    assert encoder.encoder.block[2].layer[0].SelfAttention.q.weight.is_meta
    assert encoder.shared.weight.data_ptr() == before
    assert encoder.encoder.embed_tokens.weight is encoder.shared.weight
