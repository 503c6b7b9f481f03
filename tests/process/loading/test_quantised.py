"""The library loads quantised weights itself: it gets the stored files, and the device map.

The packages that quantise need a GPU. A stand-in for a model's class shows what it is asked for.
"""

import json
from typing import ClassVar

import diffusers
import pytest
import torch
import transformers
from comparing import assert_component_equal

import shmload
from shmload._checkpoints.hub import find_model
from shmload._checkpoints.wanted import Hub, Wanted
from shmload.integrations._building.route import Asked, choose_route

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


def asked(**kwargs):
    names = ("max_memory", "max_host_memory", "share")
    given = dict.fromkeys(names) | {"pin": "auto", "keep": False, "verify": False}
    return Asked(**given | {"device_map": "cuda:0"} | kwargs)


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


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize(
    ("cls", "subfolder"),
    [(diffusers.UNet2DConditionModel, "unet"), (transformers.CLIPTextModel, "text_encoder")],
)
def test_checkpoint_that_is_quantised_is_placed_by_the_library(
    copied, cls, subfolder, is_quantised
):
    source = copied("stable-diffusion")
    path = source / subfolder / "config.json"
    config = json.loads(path.read_text())
    if is_quantised:
        path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "x"}}))
    found = find_model(Wanted(source=source, hub=Hub(subfolder=subfolder)))
    kwargs = {}
    route = choose_route(found, "float16", asked(max_memory={0: "1GiB"}), kwargs)
    assert (route.destination is None) is is_quantised
    assert route.may_stream is not is_quantised
    given = {"device_map": "cuda:0", "max_memory": {0: "1GiB"}}
    assert kwargs == (given if is_quantised else {})


def test_limit_of_host_memory_does_not_go_with_quantised_weights(saved):
    with pytest.raises(shmload.errors.ArgumentError, match="quantised weights"):
        shmload.load_model(
            Quantising,
            saved("stable-diffusion"),
            subfolder="text_encoder",
            device_map="cuda:0",
            load_in_8bit=True,
            max_host_memory="1MiB",
        )
