"""Patches on classes that stand for a library's: in front, undone, beside others' patches."""

import importlib

import pytest

from shmload._redirecting.patches import CLASSES, classes_of


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
