"""What a build depends on, and what of it a later process compares."""

import importlib
import os
import sys

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
    assert "reset_parameters is another" in why_unmet(conditions)


@pytest.mark.parametrize("value", [True, "a long text " * 50])
def test_other_constant_of_a_class(conditions, monkeypatch, value):
    monkeypatch.setattr(torch.nn.Conv2d, "call_super_init", value)
    assert why_unmet(conditions) == "torch.nn.modules.conv.Conv2d is another"


def test_documentation_is_not_compared(conditions, monkeypatch):
    monkeypatch.setattr(torch.nn.Conv2d, "__doc__", "Other words.")
    assert why_unmet(conditions) is None


def test_types_of_tensors_are_not_named(conditions):
    named = {f"{home}.{name}" for home, names in conditions.classes.items() for name in names}
    assert "torch.nn.modules.conv.Conv2d" in named
    assert not [name for name in named if name.startswith("torch.cuda.") and "Tensor" in name]


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The file of a module of diffusers that a test may change."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "planted.py"
    path.write_text("def ran(): pass\nVALUE = 1\n")
    planted = importlib.import_module("planted")
    planted.__name__ = planted.ran.__module__ = "diffusers.planted"
    monkeypatch.setitem(sys.modules, "diffusers.planted", planted)
    del sys.modules["planted"]
    return path


@pytest.mark.parametrize("value", [2, 10])
def test_file_that_is_rewritten_under_its_old_time_has_changed(module, value):
    with (trace := Trace()):
        sys.modules["diffusers.planted"].ran()
    conditions = conditions_of(trace, set())
    before = module.stat()
    assert why_unmet(conditions) is None
    module.write_text(f"def ran(): pass\nVALUE = {value}\n")
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` does
    assert why_unmet(conditions) == f"{module} has changed"
