"""The modules of a model are grouped for sharding as their ties and dtypes allow."""

import pytest
import torch
from torch import nn

from shmload import ArgumentError
from shmload._sharding.groups import find_groups


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(self.norm(x))
        return x


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 8, bias=False)


def paths(model, blocks=None):
    names = {module: path for path, module in model.named_modules()}
    return [names[group] for group in find_groups(model, blocks)]


def test_blocks_are_what_the_model_calls_indivisible():
    assert paths(Model()) == ["blocks.0", "blocks.1", ""]


def test_model_without_such_blocks_is_one_group():
    assert paths(nn.Sequential(Block())) == [""]


@pytest.mark.parametrize("blocks", [["Linear"], [nn.Linear]])
def test_blocks_can_be_named_by_class(blocks):
    assert paths(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), blocks) == ["0", ""]


def test_inner_blocks_come_before_outer_ones():
    found = paths(Model(), [Block, nn.Linear])
    assert found.index("blocks.0.layers.1") < found.index("blocks.0") < found.index("")
    assert len(found) == len(set(found)) == 8


def test_module_inside_two_others_comes_before_both():
    model = nn.Sequential(Block(), Block())
    model[1].norm = model[0].norm
    assert paths(model, [Block, nn.LayerNorm])[0] == "0.norm"


def test_unknown_class_is_refused_with_what_there_is():
    with pytest.raises(ArgumentError, match=r"no module of class Blok; it has .*Block.*'Block'\?"):
        paths(Model(), ["Blok"])


def test_module_without_parameters_is_no_block():
    assert paths(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [nn.Module]) == ["0", ""]


# Ties ---------------------------------------------------------------------------------------------


def test_blocks_that_share_a_parameter_are_none():
    model = nn.Sequential(Block(), Block(), Block())
    model[1].layers[0].weight = model[0].layers[0].weight
    assert paths(model, [Block]) == ["2", ""]


def test_block_that_shares_a_parameter_with_the_rest_is_none():
    model = Model()
    model.head.weight = model.embed.weight
    assert paths(model, [Block, nn.Embedding]) == ["blocks.0", "blocks.1", ""]


def test_tie_within_a_block_stays_there():
    model = nn.Sequential(Block(), Block())
    model[0].layers[1].weight = model[0].layers[0].weight
    assert paths(model, [Block]) == ["0", "1", ""]


def test_tie_goes_to_the_nearest_block_that_has_all_of_it():
    model = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    model[0][1].norm = model[0][0].norm
    assert paths(model, [Block, nn.Sequential]) == ["0", "1", ""]


# Dtypes -------------------------------------------------------------------------------------------


def test_modules_of_another_dtype_leave_their_block():
    model = Model().to(torch.bfloat16)
    model.blocks[0].layers[1].float()
    assert paths(model) == ["blocks.0.layers.1", "blocks.0", "blocks.1", ""]


def test_as_few_modules_as_possible_leave():
    model = nn.Sequential(Block())
    model[0].layers.to(torch.bfloat16)
    assert paths(model, [Block]) == ["0.norm", "0", ""]
    # The block's own parameter cannot leave the group, so all other parameters do.
    model[0].table = nn.Parameter(torch.zeros(4))
    assert paths(model, [Block]) == ["0.layers.0", "0.layers.1", "0", ""]


def test_module_that_leaves_is_divided_too():
    model = nn.Sequential(nn.Linear(4, 4), Block())
    model[1].layers.to(torch.bfloat16)
    model[1].norm.half()
    assert paths(model) == ["1.norm", "1", ""]


def test_mixed_dtypes_of_one_module_cannot_be_trained_together():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match=r"^1 has parameters of torch.bfloat16, torch.float32"):
        paths(model)
    model.requires_grad_(False)
    assert paths(model) == ["1", ""]
