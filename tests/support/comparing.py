"""Loads with the library alone, and compares its pipelines with shmload's."""

import json
import os
from collections import defaultdict
from pathlib import Path

import diffusers
import numpy as np
import tokenizers
import torch
import transformers
from traces import Messages, mentions_of_view, naming

import shmload

# shmload's `torch_dtype`, and the value that means the same to every version of diffusers.
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-by-name": ("bfloat16", torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "none": (None, None),
    "dict": ({"transformer": torch.bfloat16, "unet": torch.bfloat16, "default": torch.float16},)
    * 2,
    "dict-without-default": ({"vae": torch.bfloat16, "text_encoder": torch.float16},) * 2,
}
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))


def reference(source, torch_dtype=None, **kwargs):
    """Load with the library alone, by the class that the pipeline names."""
    name = json.loads(Path(source, "model_index.json").read_text())["_class_name"]
    return from_pretrained(getattr(diffusers, name), source, torch_dtype, **kwargs)


def from_pretrained(pipeline_class, source, torch_dtype, **kwargs):
    # Use the argument's new name where the library warns about the old one.
    keyword = (
        "dtype" if "_resolve_dtype" in vars(diffusers.pipelines.pipeline_utils) else "torch_dtype"
    )
    given = {} if torch_dtype is None else {keyword: torch_dtype}
    return pipeline_class.from_pretrained(source, **given, **kwargs)


# Comparing ----------------------------------------------------------------------------------------


def assert_equal(got, wanted):
    assert type(got) is type(wanted)
    assert_alike(got.config, wanted.config, "pipe.config")
    assert_alike(got.name_or_path, wanted.name_or_path, "pipe.name_or_path")
    assert list(got.components) == list(wanted.components)
    for name, part in wanted.components.items():
        assert_component_equal(getattr(got, name), part, name)


def assert_component_equal(got, wanted, name):
    assert type(got) is type(wanted), name
    if isinstance(wanted, torch.nn.Module):
        assert_modules_equal(got, wanted, name)
    elif isinstance(wanted, transformers.PreTrainedTokenizerBase):
        assert got.get_vocab() == wanted.get_vocab(), name
        assert repr(got) == repr(wanted)
        assert_alike(got.name_or_path, wanted.name_or_path, name)
        assert_alike(got.init_kwargs, wanted.init_kwargs, name)
        assert_alike(vars(got), vars(wanted), name)
    elif wanted is not None:
        assert_alike(vars(got), vars(wanted), name)


def assert_modules_equal(got, wanted, name):
    assert [(n, type(m)) for n, m in got.named_modules()] == [
        (n, type(m)) for n, m in wanted.named_modules()
    ]
    assert not any(module.training for module in got.modules()), name
    assert got.dtype == wanted.dtype, name
    for (path, inner), (_, other) in zip(got.named_modules(), wanted.named_modules(), strict=True):
        # Configurations, names, constants: everything except hooks and what is compared below.
        mine, theirs = (
            {key: value for key, value in vars(module).items() if key not in _MODULE_INTERNALS}
            for module in (inner, other)
        )
        assert_alike(mine, theirs, f"{name}.{path}")
    found, expected = tensors_of(got), tensors_of(wanted)
    assert list(found) == list(expected), name
    for key, tensor in expected.items():
        other = found[key]
        assert type(other) is type(tensor), (name, key)
        assert describe(other) == describe(tensor), (name, key)
        assert as_bytes(other) == as_bytes(tensor), (name, key)
    assert ties(found) == ties(expected), name
    assert list(got.state_dict()) == list(wanted.state_dict()), name


def tensors_of(module):
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def describe(tensor):
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.device


def as_bytes(tensor):
    # Compare bytes, because NaN != NaN and -0.0 == 0.0.
    if tensor.is_meta:
        return b""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def ties(tensors):
    """Return the sets of names whose tensors lie in the same memory."""
    names = defaultdict(set)
    for name, tensor in tensors.items():
        if tensor.numel():
            names[tensor.data_ptr()].add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def assert_alike(got, wanted, where, depth=0):
    """Compare plain data, arrays and objects' attributes: types, and values to the last bit."""
    if depth == 0 and isinstance(wanted, os.PathLike):
        got, wanted = os.fspath(got), os.fspath(wanted)
    assert type(got) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert describe(got) == describe(wanted), where
        assert as_bytes(got) == as_bytes(wanted), where
    elif isinstance(wanted, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (
            wanted.dtype,
            wanted.shape,
            wanted.tobytes(),
        ), where
    elif isinstance(wanted, tokenizers.Tokenizer):
        assert got.to_str() == wanted.to_str(), where
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), where
        for key, value in wanted.items():
            assert_alike(got[key], value, f"{where}.{key}", depth + 1)
    elif where.endswith("._use_default_values"):
        assert sorted(got) == sorted(wanted), where  # diffusers makes a list of a set
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_alike(got[number], value, f"{where}[{number}]", depth + 1)
    elif hasattr(wanted, "__dict__") and not isinstance(wanted, type) and depth < 6:
        assert_alike(vars(got), vars(wanted), where, depth + 1)
    elif type(wanted).__module__ in ("builtins", "pathlib", "numpy", "torch"):
        assert got == wanted, where


def of_components(source, dtype):
    """Return a dtype; of a dict only what names a component that the source has."""
    if not isinstance(dtype, dict):
        return dtype
    index = json.loads(Path(source, "model_index.json").read_text())
    return {name: value for name, value in dtype.items() if name == "default" or name in index}


def assert_loads_equal(source, dtype, **kwargs):
    """Load with both, compare pipelines and messages; return shmload's pipeline."""
    given, meant = (of_components(source, value) for value in DTYPES[dtype])
    torch.manual_seed(0)  # for weights that are in no file
    with Messages() as said:
        got = shmload.load_pipeline(source, torch_dtype=given, **kwargs)
    torch.manual_seed(0)
    with Messages() as wanted_said:
        wanted = reference(source, meant, **kwargs)
    assert_equal(got, wanted)
    assert naming(source, said.texts) == wanted_said.texts
    assert not mentions_of_view(got)
    return got
