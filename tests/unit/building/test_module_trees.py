"""Models are described as trees that say what must stay whole."""

import torch

from shmload._building.module_trees import whole_classes


class Encoder(torch.nn.Module):
    _no_split_modules = ("EncoderLayer",)


class Model(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def test_classes_of_inner_models_stay_whole_too():
    assert whole_classes(Model(torch.nn.Sequential(Encoder()))) == {"Block", "EncoderLayer"}
    assert whole_classes(Model(torch.nn.Linear(1, 1))) == {"Block"}


def test_model_that_says_nothing_names_no_class():
    assert whole_classes(torch.nn.Linear(1, 1)) == set()
