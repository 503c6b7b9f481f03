"""Which arguments of `from_pretrained` go to shmload, which are dropped, which are left."""

import pytest
import torch

from shmload._redirecting.calls import InDoubt, read_call

_KINDS = ("pipeline", "diffusers model", "transformers model")


def read(kind, *args, **kwargs):
    return read_call(kind, "path", args, kwargs)


@pytest.mark.parametrize("kind", _KINDS)
def test_defaults_are_dropped_and_the_caller_keeps_its_own(kind):
    given = {"path": "a", "low_cpu_mem_usage": True, "device_map": None, "force_download": False}
    kept = dict(given)
    assert read_call(kind, "path", (), given).kwargs == {}
    assert given == kept


@pytest.mark.parametrize(
    "kwargs",
    [
        {"config": {}},
        {"device_map": "auto"},
        {"dtype": torch.float16, "torch_dtype": torch.float16},
        {"dtype": "no_such"},
        {"force_download": True},
        {"gguf_file": "a.gguf"},
        {"keep": True},
        {"local_files_only": 1},
        {"low_cpu_mem_usage": False},
        {"no_such": 1},
        {"quantization_config": object()},
        {"revision": ""},
        {"state_dict": {}},
        {"trust_remote_code": True},
        {"use_safetensors": False},
        {"variant": 16},
    ],
    ids=lambda kwargs: "-".join(f"{name}" for name in kwargs),
)
@pytest.mark.parametrize("kind", _KINDS)
def test_other_arguments_are_left_to_the_library(kind, kwargs):
    with pytest.raises(InDoubt) as caught:
        read(kind, "a", **kwargs)
    assert all(name in str(caught.value) for name in kwargs)


@pytest.mark.parametrize("kwargs", [{}, *({"path": path} for path in (None, "", "~/a", b"a"))])
def test_odd_sources_are_left_to_the_library(kwargs):
    with pytest.raises(InDoubt):
        read("pipeline", **kwargs)
    with pytest.raises(InDoubt):
        read("pipeline", "a", "b")


def test_names_of_dtypes_pass_to_models_of_transformers_only():
    assert read("transformers model", "a", dtype="auto").dtype == "auto"
    for kind in ("pipeline", "diffusers model"):
        with pytest.raises(InDoubt, match="torch_dtype='auto'"):
            read(kind, "a", torch_dtype="auto")


def test_dtypes_by_component_pass_to_pipelines_only():
    by_component = {"unet": torch.float16, "default": torch.float32}
    assert read("pipeline", "a", torch_dtype=by_component).dtype == by_component
    for kind, dtypes in (("transformers model", by_component), ("pipeline", {"unet": None})):
        with pytest.raises(InDoubt):
            read(kind, "a", torch_dtype=dtypes)
