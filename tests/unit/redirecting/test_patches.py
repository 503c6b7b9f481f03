"""Patches on classes that stand for a library's: in front, undone, beside others' patches."""

import functools
import importlib
import types

import pytest

from shmload._redirecting import calls, patches
from shmload._redirecting.patches import CLASSES, Patch, classes_of

_HOME = "diffusers.pipelines.pipeline_utils"
_CODE = """
import functools

def checked(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

class DiffusionPipeline:
    @classmethod
    @checked
    def from_pretrained(cls, path, *, dtype=None, **kwargs):
        "Load it."
        return cls.__name__, path, kwargs
"""


@pytest.fixture
def module():
    """A module that stands for a library's."""
    made = types.ModuleType(_HOME)
    exec(_CODE, vars(made))
    return made


@pytest.fixture
def base(module, monkeypatch):
    """Its class; a call that a patch leads elsewhere says so."""
    monkeypatch.setitem(patches._open, "a test", patches.Options("converted", False))
    monkeypatch.setattr(
        calls, "answer", lambda patch, _, *call: ("routed", patch.call_original(*call))
    )
    return module.DiffusionPipeline


def test_calls_of_the_class_and_of_subclasses_are_led(base):
    class Sub(base):
        pass

    class Own(base):
        @classmethod
        def from_pretrained(cls, path, **kwargs):
            return "own", super().from_pretrained(path, **kwargs)

    patch = Patch(base, "pipeline")
    assert base.from_pretrained("a") == ("routed", ("DiffusionPipeline", "a", {}))
    assert Sub().from_pretrained("b", x=1) == ("routed", ("Sub", "b", {"x": 1}))
    assert Own.from_pretrained("a") == ("own", ("routed", ("Own", "a", {})))
    assert [patch.answers(each) for each in (base, Sub, Own)] == [True, True, False]
    assert patch.path_argument == "path"


def test_patch_of_another_on_top_survives_and_still_works(base, monkeypatch):
    patch = Patch(base, "pipeline")
    inner = base.from_pretrained

    def theirs(cls, *args, **kwargs):
        return "theirs", inner(*args, **kwargs)

    base.from_pretrained = classmethod(theirs)
    mine = vars(base)["from_pretrained"]
    assert not patch.answers(base)
    patch.undo()
    assert vars(base)["from_pretrained"] is mine
    assert base.from_pretrained("a") == ("theirs", ("routed", ("DiffusionPipeline", "a", {})))
    monkeypatch.delitem(patches._open, "a test")
    assert base.from_pretrained("a") == ("theirs", ("DiffusionPipeline", "a", {}))


def test_class_that_another_program_has_patched_is_left(module, base):
    assert classes_of(module) == [(base, "pipeline")]
    before = vars(base)["from_pretrained"]

    @functools.wraps(before.__func__)
    def theirs(cls, *args, **kwargs):
        return "theirs", before.__get__(None, cls)(*args, **kwargs)

    base.from_pretrained = classmethod(theirs)
    assert classes_of(module) == []


@pytest.mark.libraries
def test_classes_of_the_libraries_are_found():
    found = {
        f"{owner.__module__.partition('.')[0]}.{owner.__name__}"
        for name in CLASSES
        for owner, _ in classes_of(importlib.import_module(name))
    }
    assert {
        "diffusers.AutoModel",
        "diffusers.AutoPipelineForImage2Image",
        "diffusers.AutoPipelineForInpainting",
        "diffusers.AutoPipelineForText2Image",
        "diffusers.DiffusionPipeline",
        "diffusers.FromOriginalModelMixin",
        "diffusers.FromSingleFileMixin",
        "diffusers.ModelMixin",
        "transformers.AutoModel",
        "transformers.AutoModelForCausalLM",
        "transformers.PreTrainedModel",
    } <= found
