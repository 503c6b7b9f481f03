"""What a build depends on, and what of it a later process compares."""

import diffusers
import pytest
import torch

from shmload._building.conditions import Trace, conditions_of, why_unmet


@pytest.fixture(scope="module")
def conditions():
    trace = Trace()
    with trace:
        model = diffusers.AutoencoderTiny()
    return conditions_of(trace, {type(module) for module in model.modules()})


def test_nothing_has_changed(conditions):
    assert why_unmet(conditions) is None


def test_other_function(conditions, monkeypatch):
    def reset_parameters(self):
        """Do as torch does."""

    monkeypatch.setattr(torch.nn.modules.conv._ConvNd, "reset_parameters", reset_parameters)
    assert "another function" in why_unmet(conditions)


@pytest.mark.parametrize("value", [True, "a long text " * 50])
def test_other_constant_of_a_class(conditions, monkeypatch, value):
    monkeypatch.setattr(torch.nn.Conv2d, "call_super_init", value)
    assert why_unmet(conditions) == "torch.nn.modules.conv.Conv2d is another class"


def test_documentation_is_not_compared(conditions, monkeypatch):
    monkeypatch.setattr(torch.nn.Conv2d, "__doc__", "Other words.")
    assert why_unmet(conditions) is None


def test_types_of_tensors_are_not_named(conditions):
    named = {
        f"{home}.{name}" for home, names in conditions.digests["classes"].items() for name in names
    }
    assert "torch.nn.modules.conv.Conv2d" in named
    assert not [name for name in named if name.startswith("torch.cuda.") and "Tensor" in name]
