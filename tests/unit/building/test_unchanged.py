"""What a pipeline that was loaded ahead depends on, and what of it is compared."""

import logging
import warnings

import pytest
import torch

from shmload._building.unchanged import Facts
from shmload._host.fingerprint import files_below


@pytest.fixture
def facts(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with warnings.catch_warnings():
        warnings.resetwarnings()  # those of pytest
        yield Facts(str(tmp_path), files_below(tmp_path), [torch.nn.Linear(1, 1)])


def test_nothing_has_changed(facts):
    assert facts.why_changed() is None


@pytest.mark.parametrize("action", ["always", "error", "default"])
def test_program_that_asks_for_all_warnings(facts, action):
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        assert "all warnings" in facts.why_changed()


def test_program_that_asks_for_fewer_warnings(facts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert facts.why_changed() is None


def test_program_that_asks_for_details(facts, monkeypatch):
    monkeypatch.setattr(logging.getLogger("diffusers"), "level", logging.DEBUG)
    logging.getLogger("diffusers").manager._clear_cache()
    try:
        assert "log more" in facts.why_changed()
    finally:
        monkeypatch.undo()
        logging.getLogger("diffusers").manager._clear_cache()


def test_function_of_any_module_that_was_replaced(facts, monkeypatch):
    monkeypatch.setattr("json.load", lambda *args: None)
    assert facts.why_changed() == "json.load was replaced"


def test_module_that_was_out_of_reach_is_not_compared(facts, monkeypatch):
    monkeypatch.setattr("json.load", lambda *args: None)
    assert facts.why_changed({"json"}) is None
    assert facts.why_changed({"json.decoder"}) == "json.load was replaced"


def test_method_of_a_class_that_was_built(facts, monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *args: None)
    assert facts.why_changed() == "Linear.forward was replaced"


def test_file_that_was_added(facts, tmp_path):
    (tmp_path / "new").touch()
    assert "has changed" in facts.why_changed()


def test_variable_of_a_library(facts, monkeypatch):
    monkeypatch.setenv("HF_SOMETHING", "1")
    assert "a variable has changed" in facts.why_changed()
