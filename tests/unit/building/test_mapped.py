"""The modules of a model are found as torch finds them."""

from torch import nn

from shmload._building.mapped import modules_of


def test_modules_are_those_of_torch_in_its_order():
    shared = nn.Linear(2, 2)
    model = nn.ModuleList([nn.Sequential(shared, nn.ReLU()), shared, nn.Sequential(nn.ReLU())])
    model.register_module("absent", None)
    model[2].register_module("above", model)  # a cycle
    assert list(modules_of(model)) == list(model.modules())
