"""`to_device` copies any module to a device completely, or leaves it unchanged."""

import pytest
import torch
from torch import nn

import shmload
from shmload._devices import moves

pytestmark = pytest.mark.libraries


def test_any_module_goes_to_a_device(accelerators):
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wanted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weight = module[0].weight
    assert shmload.to_device(module, "cuda:1") is module
    assert module[0].weight is weight
    assert accelerators["cuda:1"].calls.count("copy") > 0
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_inference_mode(accelerators, is_made_inside):
    with torch.inference_mode(is_made_inside):
        module = nn.Linear(8, 8)
    wanted = module.weight.clone()
    with torch.inference_mode():
        shmload.to_device(module, 0)
        assert torch.equal(module.weight, wanted)


def test_module_stays_as_it_was_where_torch_cannot_move_a_part(accelerators, monkeypatch):
    class Stubborn(nn.Parameter):
        def to(self, *args):
            raise RuntimeError("no")

    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = Stubborn(torch.zeros(8, 8))
    before = module[0].weight.data_ptr()
    with pytest.raises(RuntimeError, match="no"):
        shmload.to_device(module, 0)
    assert module[0].weight.data_ptr() == before


def test_module_stays_as_it_was_where_a_device_is_full(accelerators):
    accelerators["cuda:0"]._fails_at = 0
    module = nn.Linear(8, 8)
    before = module.weight.data_ptr()
    with pytest.raises(torch.OutOfMemoryError):
        shmload.to_device(module, 0)
    assert module.weight.data_ptr() == before


class Tied(nn.Module):
    """Modules that hold one parameter beside a submodule of theirs, and a buffer."""

    def __init__(self, table=None):
        super().__init__()
        self.table = nn.Parameter(torch.ones(8)) if table is None else table
        self.register_buffer("shift", torch.ones(8))
        self.layer = nn.Linear(8, 8)
        if table is None:
            self.inner = Tied(self.table)


def test_what_does_not_wait_is_copied_or_the_module_stays_as_it_was(accelerators, monkeypatch):
    model = Tied()
    tensors = (model.table, model.shift, model.inner.shift)
    before = [tensor.data_ptr() for tensor in tensors]
    accelerators["cuda:0"].room = 0
    with pytest.raises(torch.OutOfMemoryError):
        shmload.to_device(model, {"": "offload"})
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert not hasattr(model, "hf_device_map")
    accelerators["cuda:0"].room = None
    monkeypatch.setattr(moves, "takes_data_of", lambda *_: False)  # as of a package's own device
    shmload.to_device(model, {"": "offload"})
    assert model.table is model.inner.table
    now = (model.table, model.shift, model.inner.shift)
    assert not {tensor.data_ptr() for tensor in now} & set(before)
    assert model.layer.weight.untyped_storage().nbytes() == 256  # it waits


@pytest.mark.parametrize("others", [0, "cpu"])
def test_single_tensor_that_is_to_wait_lies_where_it_is_used(accelerators, others):
    model = Tied(nn.Parameter(torch.ones(8)))
    before = model.table.data_ptr()
    shmload.to_device(model, {"": others, "table": "offload"})
    assert model.table.data_ptr() != before
    assert model.layer(torch.ones(1, 8)).shape == (1, 8)
