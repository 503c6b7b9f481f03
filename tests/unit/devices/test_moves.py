"""A module's tensors are gathered for the copy and replaced by the device's."""

import pytest
import torch
from devices import LateDevice
from torch import nn
from warming import assert_same

from shmload._devices.moves import Moves
from shmload._devices.upload import bring


def move(module, runtime_of):
    moves = Moves([(module, runtime_of)])
    bring(moves, max_nbytes=12 << 10)
    moves.commit()
    return moves


def contents(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(33, 17) for _ in range(5))
        self.large = nn.Linear(512, 1024)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(3.0), requires_grad=False)


def test_ties_stay():
    model = Model()
    model.layers[1].weight = model.layers[0].weight
    model.layers[3].weight = nn.Parameter(model.layers[2].weight.detach())  # the same bytes
    shared = torch.arange(5)
    model.register_buffer("one", shared)
    model.norm.register_buffer("other", shared)
    wanted = contents(model)
    device = LateDevice()
    move(model, lambda path: device)
    assert_same(model.state_dict(), wanted)
    assert model.layers[1].weight is model.layers[0].weight
    assert model.layers[3].weight.data_ptr() == model.layers[2].weight.data_ptr()
    assert model.one.data_ptr() == model.norm.other.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::2],
        torch.empty(0, 3),
        torch.zeros(3).expand(4, 3),
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
        torch.arange(6.0).to_sparse(),
    ],
    ids=["transposed", "strided", "empty", "expanded", "conjugate", "sparse"],
)
def test_tensor_that_is_no_run_of_bytes_goes_the_ordinary_way(tensor):
    module = nn.Module()
    module.register_buffer("odd", tensor)
    module.weight = nn.Parameter(torch.arange(9.0))
    device = LateDevice()
    move(module, lambda path: device)
    assert torch.equal(module.odd.to_dense(), tensor.to_dense())
    assert torch.equal(module.weight.detach(), torch.arange(9.0))


def test_device_that_shares_the_hosts_memory_gets_a_copy_of_what_torch_moves(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    whole = torch.from_file(str(path), size=4096, dtype=torch.float32)
    module = nn.Module()
    module.register_buffer("odd", whole.view(64, 64).t())
    seen = []

    class Integrated(LateDevice):
        device = torch.device("meta")

    class Tensor(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            return super().__torch_function__(function, types, args, kwargs or {})

    module.odd = module.odd.as_subclass(Tensor)
    device = Integrated(is_integrated=True)
    Moves([(module, lambda path: device)]).commit()
    assert seen.index("clone") < seen.index("to")
    assert module.odd.is_meta


class ForeignDevice(LateDevice):
    """Its memory cannot be exchanged for the CPU's: as devices that a package adds to torch."""

    def empty(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def test_new_parameters_take_the_place_of_those_that_cannot_be_moved():
    model = Model()
    model.tied = nn.Linear(512, 1024)
    model.tied.weight = model.large.weight
    buffers = {name for name, _ in model.named_buffers()}
    device = ForeignDevice()
    Moves([(model, lambda path: device)]).commit()
    assert model.tied.weight is model.large.weight
    assert type(model.tied.weight) is nn.Parameter
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert not model.scale.requires_grad
    assert model.large.weight.requires_grad
    assert {name for name, _ in model.named_buffers()} == buffers
