"""Files of quantised weights are known by their headers."""

import pytest

from shmload._checkpoints.header import Header, TensorSpec
from shmload._checkpoints.quantised import are_quantised


def header(metadata=None, **dtypes):
    tensors = (TensorSpec(name, dtype, (0,), 0, 0) for name, dtype in dtypes.items())
    return Header(tensors=tuple(tensors), metadata=metadata, data_offset=0)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"a.weight": "U8", "a.weight.absmax": "F32"},
        {"a.weight": "I8", "a.SCB": "F32"},
        {"a.weight._data": "F8_E4M3", "a.weight._scale": "BF16"},
        {"a._weight_qdata": "I8", "a._weight_scale": "BF16"},
        {"a.qweight": "I32", "a.scales": "F16", "a.qzeros": "I32"},
        {"a.qweight": "I8", "a.wscales": "BF16", "a.smooth_factor": "BF16"},
        {"a.weight": "F8_E4M3", "a.weight_scale": "F32"},
        {"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"},
        {"a.weight": "F8_E4M3", "a.scale_weight": "F32"},
        {"a.weight_packed": "U8", "a.weight_scale": "F8_E4M3"},
    ],
    ids=str,
)
def test_weights_with_scales_are_quantised(dtypes):
    assert are_quantised([header(**{"norm.weight": "BF16"}, **dtypes)])


@pytest.mark.parametrize(
    "dtypes",
    [
        {},
        {"a.weight": "F8_E4M3"},  # plain floats of 8 bits, which a library casts
        {"a.weight": "F32", "a.weight_scale": "F32"},
        {"a.weight": "I8"},
        {"a.weight": "F8_E4M3", "b.weight_scale": "F32"},
        {"position_ids": "I64", "a._data": "I64", "a._scale": "F32"},
    ],
    ids=str,
)
def test_others_are_not(dtypes):
    assert not are_quantised([header({"format": "pt"}, **dtypes)])


def test_file_may_say_so():
    assert are_quantised([header({"quantization_config": '{"method": "svdquant"}'}, a="BF16")])
