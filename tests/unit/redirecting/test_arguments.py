"""Which arguments of `from_pretrained` go to shmload, which are dropped, which are left."""

from pathlib import Path

import diffusers
import pytest
import torch

from shmload._redirecting.arguments import InDoubt, names_known, read_call
from shmload._redirecting.patches import MODULES, classes_of

_KNOWN = {
    *("cache_dir", "device_map", "dtype", "force_download", "local_files_only"),
    *("low_cpu_mem_usage", "output_loading_info", "quantization_config", "revision", "subfolder"),
    *("token", "torch_dtype", "trust_remote_code", "use_safetensors", "variant"),
}


def read(kind, *args, **kwargs):
    return read_call(kind, _KNOWN, "path", args, kwargs)


@pytest.mark.parametrize("kind", ["pipeline", "diffusers model", "transformers model"])
def test_plain_arguments_pass(kind):
    found = read(kind, "a", torch_dtype=torch.float16, variant="fp16", use_safetensors=True)
    assert found == ("a", torch.float16, {"variant": "fp16", "use_safetensors": True})
    assert read(kind, path="a", revision=None) == ("a", None, {})
    assert read(kind, Path("a"), local_files_only=True)[2] == {"local_files_only": True}


@pytest.mark.parametrize("kind", ["pipeline", "diffusers model", "transformers model"])
def test_defaults_are_dropped(kind):
    given = {"low_cpu_mem_usage": True, "device_map": None, "force_download": False}
    assert read(kind, "a", use_safetensors=None, **given).kwargs == {}


def test_values_that_the_libraries_own_functions_pass_are_neutral():
    given = {"trust_remote_code": None, "code_revision": None, "config": None}
    known = _KNOWN | {"code_revision", "config", "_from_pipeline", "_commit_hash"}
    found = read_call("transformers model", known, "path", ("a",), given)
    assert found.kwargs == {}
    revision = type("Revision", (str,), {"__module__": "huggingface_hub.any"})("main")
    revision.resolved = "c" * 40
    found = read_call(
        *("transformers model", known, "path", ("a",)),
        {**given, "_from_pipeline": "fill-mask", "_commit_hash": "c", "revision": revision},
    )
    assert found.kwargs == {"revision": "c" * 40}
    for other in ({"config": {}}, {"_from_pipeline": 1}, {"code_revision": "main"}):
        with pytest.raises(InDoubt, match=next(iter(other))):
            read_call("transformers model", known, "path", ("a",), other)
    with pytest.raises(InDoubt, match="_from_pipeline"):
        read_call("diffusers model", known, "path", ("a",), {"_from_pipeline": "fill-mask"})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"device_map": "auto"},
        {"dtype": "float16"},
        {"dtype": torch.int8},
        {"dtype": torch.float16, "torch_dtype": torch.float16},
        {"force_download": True},
        {"gguf_file": "a.gguf"},
        {"keep": True},
        {"local_files_only": 1},
        {"low_cpu_mem_usage": False},
        {"low_cpu_mem_usage": None},
        {"quantization_config": object()},
        {"revision": ""},
        {"state_dict": {}},
        {"trust_remote_code": True},
        {"use_safetensors": False},
        {"variant": 16},
        {"workers": 2},
    ],
    ids=lambda kwargs: "-".join(f"{name}" for name in kwargs),
)
@pytest.mark.parametrize("kind", ["pipeline", "diffusers model", "transformers model"])
def test_other_arguments_are_left_to_the_library(kind, kwargs):
    if kind == "transformers model" and kwargs == {"dtype": "float16"}:
        assert read(kind, "a", **kwargs).dtype == "float16"
        return
    with pytest.raises(InDoubt) as caught:
        read(kind, "a", **kwargs)
    assert all(name in str(caught.value) for name in kwargs)


@pytest.mark.parametrize("kwargs", [{}, *({"path": path} for path in (None, "", "~/a", b"a"))])
def test_odd_sources_are_left_to_the_library(kwargs):
    with pytest.raises(InDoubt):
        read("pipeline", **kwargs)


def test_two_sources_are_left_to_the_library():
    with pytest.raises(InDoubt):
        read("pipeline", "a", "b")
    with pytest.raises(InDoubt):
        read("pipeline", "a", path="b")


def test_argument_that_this_version_does_not_know_is_left_to_it():
    with pytest.raises(InDoubt, match="dtype"):
        read_call("pipeline", {"torch_dtype"}, "path", ("a",), {"dtype": torch.float16})


def test_components_pass_to_pipelines_only():
    part = torch.nn.Linear(1, 1)
    assert read("pipeline", "a", unet=part, safety_checker=None).kwargs == {
        "unet": part,
        "safety_checker": None,
    }
    with pytest.raises(InDoubt, match="unet=<Linear>"):
        read("diffusers model", "a", unet=part)


@pytest.mark.parametrize("kind", ["pipeline", "diffusers model", "transformers model"])
def test_quantisers_of_the_libraries_pass(kind):
    config = diffusers.QuantoConfig(weights_dtype="int8")
    assert read(kind, "a", quantization_config=config).kwargs == {"quantization_config": config}
    with pytest.raises(InDoubt):  # this method does not know it
        read_call(kind, {"torch_dtype"}, "path", ("a",), {"quantization_config": config})


def test_dtypes_by_component_pass_to_pipelines_only():
    by_component = {"unet": torch.float16, "default": torch.float32}
    assert read("pipeline", "a", dtype=by_component).dtype == by_component
    with pytest.raises(InDoubt):
        read("transformers model", "a", dtype=by_component)
    with pytest.raises(InDoubt):
        read("pipeline", "a", dtype={"unet": None})
    with pytest.raises(InDoubt):
        read("pipeline", "a", dtype={torch.nn.Linear: torch.float16})


def test_arguments_stay_as_they_were():
    kwargs = {"path": "a", "dtype": torch.float16, "low_cpu_mem_usage": True}
    kept = dict(kwargs)
    read_call("pipeline", _KNOWN, "path", (), kwargs)
    assert kwargs == kept


def test_names_in_the_code_of_a_method_are_known():
    def method(cls, path, *, config=None, **kwargs):
        kwargs.pop("variant", None)
        for name in ["mirror", "proxies"]:
            kwargs.pop(name)
        local = config
        return local

    assert {"config", "variant", "mirror", "proxies"} <= names_known(method)
    assert not {"device_map", "local"} & names_known(method)


@pytest.mark.libraries
def test_classes_of_the_libraries_are_found():
    import importlib

    found = {
        f"{owner.__module__.partition('.')[0]}.{owner.__name__}"
        for name in MODULES
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
