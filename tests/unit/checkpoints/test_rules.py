"""Dtype rules convert tensors as the libraries' classes do, and are remembered."""

import pytest
import torch

from shmload._checkpoints.dtypes import parse_dtype
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.rule import RAW, Rule, rule_for, wanted_dtype
from shmload._checkpoints.source import Checkpoint
from shmload.errors import UnknownDtype


def _tensor(name="a.b.weight", dtype="F32"):
    return TensorSpec(name, dtype, (1,), 0, 8)


def _checkpoint(tmp_path, library, class_name, **config):
    return Checkpoint(
        component="part",
        folder=tmp_path,
        library=library,
        class_name=class_name,
        config=config,
        shards=(),
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.bfloat16, "BF16"),
        ("bfloat16", "BF16"),
        ("torch.float16", "F16"),
        ("bf16", "BF16"),
        ("fp32", "F32"),
        ("F16", "F16"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
    ],
)
def test_dtype_is_understood_in_every_usual_form(given, wanted):
    assert parse_dtype(given) == wanted


def test_unknown_dtype_lists_the_usual_ones_first_and_suggests_the_nearest():
    with pytest.raises(
        UnknownDtype, match="use one of bfloat16, float16, float32, float64, float8"
    ):
        parse_dtype("int8")
    for given, near in (("bfloat", "bfloat16"), ("BFloat-16", "bfloat16"), ("fp-16", "fp16")):
        with pytest.raises(UnknownDtype, match=f"did you mean {near!r}"):
            parse_dtype(given)


def test_dtype_by_component_falls_back_as_in_diffusers():
    assert wanted_dtype({"part": torch.bfloat16}, "part") == "BF16"
    assert wanted_dtype({"other": torch.bfloat16}, "part") == "F32"
    assert wanted_dtype({"other": "bf16", "default": "fp16"}, "part") == "F16"
    assert wanted_dtype(None, "part") is None


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "U8", "C64", "F4"])
def test_only_floats_are_converted(dtype):
    assert Rule(target="BF16")(_tensor(dtype=dtype)) == dtype


def test_exceptions_match_whole_parts_of_the_name():
    rule = Rule(target="BF16", fp32_parts=("norm", "shift"))
    assert rule(_tensor("block.norm.weight")) == "F32"
    assert rule(_tensor("block.norm.weight", "F16")) == "F32"
    assert rule(_tensor("block.norm1.weight")) == "BF16"
    # A detour over float32 would round twice.
    assert rule(_tensor("block.norm.weight", "F64")) == "F64"


def test_widening_converts_only_what_float32_holds():
    rule = Rule(target="F32", is_widening=True)
    assert [rule(_tensor(dtype=d)) for d in ("F16", "BF16", "F8_E4M3")] == ["F32"] * 3
    assert rule(_tensor(dtype="F64")) == "F64"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_transformers_rule_leaves_what_stays_float32_under_every_dtype(
    tmp_path, monkeypatch, dtype
):
    from transformers import CLIPTextConfig, CLIPTextModel

    monkeypatch.setattr(CLIPTextModel, "_keep_in_fp32_modules_strict", ["final_layer_norm"])
    config = CLIPTextConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    CLIPTextModel(config).save_pretrained(tmp_path)
    clip = _checkpoint(tmp_path, "transformers", "CLIPTextModel", marker=str(tmp_path))
    only = rule_for(clip, dtype).only
    assert only
    assert not any("final_layer_norm" in name for name in only)
    assert any(name.endswith("layers.0.self_attn.q_proj.weight") for name in only)


@pytest.mark.parametrize(
    ("library", "class_name"),
    [("diffusers", "NoSuchModel"), ("no_such_library", "Model"), ("transformers", "CLIPTokenizer")],
)
def test_unknown_class_is_left_raw(tmp_path, library, class_name):
    assert rule_for(_checkpoint(tmp_path, library, class_name), "bf16") == RAW
