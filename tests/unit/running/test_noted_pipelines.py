"""What a template notes of the pipelines that its programs load."""

import os
import sys

import pytest

from shmload._templates.messages import Program
from shmload._templates.pipelines import Pipelines
from shmload.integrations._building import prepared


@pytest.fixture
def door(monkeypatch, tmp_path):
    """The module that programs tell of their loads, as in a copy of a template."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("on_load", "hidden"):
        monkeypatch.setattr(prepared, name, None)
    return prepared


def load(door, program, source):
    """Note a load of a program."""
    pipelines = Pipelines("key", sys.modules, stash=None)
    pipelines.begin(Program("script", program, [], [], "", 1))
    request = door.request_of(source, "bfloat16", True, None)
    assert request is not None
    door.note(request, tuple(sys.modules))
    return pipelines


def test_second_load_of_one_program_is_noted(door, tmp_path):
    assert load(door, b"app.py", str(tmp_path)).sources() == []
    assert load(door, b"app.py", str(tmp_path)).sources() == [str(tmp_path)]


@pytest.mark.parametrize("place", ["program", "source"])
def test_load_with_a_name_that_is_no_utf8_succeeds_and_is_not_noted(door, tmp_path, place):
    name = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(name)
    program = name if place == "program" else b"app.py"
    source = os.fsdecode(name) if place == "source" else str(tmp_path)
    for _ in range(2):
        assert load(door, program, source).sources() == []
