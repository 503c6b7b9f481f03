"""The library loads quantised weights itself: it gets the stored files, and the device map.

A stand-in for a model's class shows what it is asked for. The packages that quantise are tried in
`tests/process/publishing/test_quantisers.py`, where they are installed.
"""

import gc
from typing import ClassVar

import pytest
import torch
import transformers
from comparing import assert_component_equal
from mappings import Mappings
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing._internal.two_tensor import TwoTensor
from warming import assert_same

import shmload

pytestmark = pytest.mark.libraries


class Quantising(transformers.CLIPTextModel):
    """Notes what it is asked, and what its files hold, before it loads without quantising."""

    asked: ClassVar[dict] = {}

    @classmethod
    def from_pretrained(cls, path, **kwargs):
        cls.asked = dict(kwargs)
        for name in ("quantization_config", "load_in_4bit", "load_in_8bit", "device_map"):
            kwargs.pop(name, None)
        found = super().from_pretrained(path, **kwargs)
        found.came_from = str(path)
        return found


@pytest.mark.parametrize("name", ["quantization_config", "load_in_4bit", "load_in_8bit"])
def test_library_gets_stored_weights_and_the_device_map(saved, name, evicts):
    source = saved("stable-diffusion")
    got = shmload.load_model(
        Quantising,
        source,
        subfolder="text_encoder",
        dtype="float16",
        device_map="cuda:0",
        keep=True,
        **{name: True},
    )
    assert Quantising.asked[name] is True
    assert Quantising.asked["device_map"] == "cuda:0"
    wanted = Quantising.from_pretrained(
        source, subfolder="text_encoder", dtype=torch.float16, **{name: True}
    )
    assert got.came_from == wanted.came_from
    assert_component_equal(got, wanted, "text_encoder")
    assert {info.conversion for info in shmload.segments()} == {"raw"}


class MadeOfTwo(transformers.CLIPTextModel):
    """Has a weight without a storage of its own, as torchao and quanto make them."""

    @classmethod
    def from_pretrained(cls, path, **kwargs):
        found = super().from_pretrained(path, **kwargs)
        layer = found.get_input_embeddings()
        layer.weight = torch.nn.Parameter(TwoTensor(layer.weight.data, layer.weight.data))
        return found


def test_model_holds_the_segment_that_the_parts_of_its_tensors_lie_in(saved, evicts):
    source = saved("stable-diffusion")
    given = {"subfolder": "text_encoder", "dtype": "bfloat16"}
    weight = (
        shmload.load_model(MadeOfTwo, source, share=True, **given).get_input_embeddings().weight
    )
    gc.collect()
    assert [info.is_leased for info in shmload.segments()] == [True]
    assert "/shmload-" in Mappings().find(weight.a)[1]
    del weight
    gc.collect()
    assert shmload.segments() == []


# As ComfyUI and Nunchaku write them; no library that is installed here reads these.
_PACKED = {
    "scaled floats": {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.scale_weight": torch.tensor(0.3),
    },
    "SVDQuant": {
        "a.qweight": torch.ones(4, 4, dtype=torch.int8),
        "a.wscales": torch.full((4, 1), 0.3),
    },
}


@pytest.mark.parametrize("kind", list(_PACKED))
def test_quantised_file_is_never_cast_and_keeps_its_metadata(tmp_path, kind, evicts):
    tensors = _PACKED[kind] | {"a.bias": torch.full((4,), 0.3)}
    path = tmp_path / "packed.safetensors"
    save_file(tensors, path, {"config": '{"a.b": 1}'})
    assert_same(shmload.load_state_dict(path, "bfloat16"), tensors)
    with shmload.view(path, dtype="bfloat16", keep=True) as lent, safe_open(lent, "pt") as file:
        assert file.metadata()["config"] == '{"a.b": 1}'
    (info,) = shmload.segments()
    assert info.conversion == "raw"
    (planned,) = shmload.plan(path, dtype="bfloat16").shards
    assert planned.segment == info.name
