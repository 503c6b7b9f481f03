"""Device maps are read in every accepted form, the right key wins, and the print means the same."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placing import block, blocks, flux, leaf, model

from shmload import ArgumentError
from shmload._placement.device_map import expand, number_patterns, parse_device_map
from shmload._placement.inventory import parse_inventory

INVENTORY = parse_inventory("4x80GiB")


def _devices(device_map, pipeline=None):
    return expand(parse_device_map(device_map, INVENTORY), pipeline or flux())


# Forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["cuda:1", 1, torch.device("cuda", 1)])
def test_device_is_for_all(given):
    assert set(_devices(given).values()) == {"cuda:1"}


@pytest.mark.parametrize(
    "device_map",
    [
        {"": 0, "transformer.transformer_blocks.0": 1},
        {"": 0, "transformer": {"": 0, "transformer_blocks": {"0": 1}}},
        {"": 0, "transformer": {"transformer_blocks": {"": 1, "[1-9]": 0}}},
        {"": 0, "trans*.transformer_blocks.[0]": torch.device("cuda:1")},
    ],
)
def test_nested_dotted_and_patterned_maps_mean_the_same(device_map):
    devices = _devices(device_map)
    assert devices.pop("transformer.transformer_blocks.0") == "cuda:1"
    assert set(devices.values()) == {"cuda:0"}
    assert devices.keys() > {"transformer.pos_embed", "transformer.transformer_blocks.1"}


@pytest.mark.parametrize(
    "device_map",
    [
        {"text_encoder": 2, "text_encoder*": 1, "": 0},
        {"*": 0, "text_encoder": 2, "text_*": 3, "text_encoder*": 1},
        {"": 3, "*": 0, "text_encoder*": 1, "text_encode[r]": 3, "text_encoder": 2},
    ],
)
def test_longest_key_wins_and_an_exact_one_beats_a_pattern(device_map):
    devices = _devices(device_map)
    assert devices["text_encoder.embeddings"] == "cuda:2"
    assert devices["text_encoder_2.shared"] == "cuda:1"
    assert devices["vae.decoder"] == "cuda:0"


def test_model_without_a_pipeline_has_paths_of_its_own():
    alone = (model("", leaf("x"), blocks("blocks", 2)),)
    devices = _devices({"": 0, "blocks.[12]": 1}, alone)
    assert devices == {"x": "cuda:0", "blocks.0": "cuda:0", "blocks.1": "cuda:1"}


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("transformer.transformer_blocks.4", r"transformer_blocks has no module '4'; it has 0 to"),
        ("vae.decoder.x", r"vae.decoder has no module 'x'; it cannot be divided"),
    ],
)
def test_unknown_module_is_told_the_known_ones_and_the_nearest(path, reason):
    with pytest.raises(ArgumentError, match=reason):
        _devices({"": 0, path: 1})


@pytest.mark.parametrize(
    ("device_map", "reason"),
    [
        ("auot", "did you mean 'auto'"),
        ("gpu", r"'gpu' is not a device .*, balanced.*; did you mean 'cuda'"),
        (None, "None is not a device"),
        ({"": "balanced"}, "for a whole pipeline"),
        ({1: 0}, "its key 1 is not"),
        (functools.reduce(lambda inner, _: {"a": inner}, range(3000), 0), "more than 100 levels"),
        (
            {"text*": 0, "vae": 0, "transformer": {"x_embedder": 0, "*_blocks.[0-2]": 1}},
            r"transformer.pos_embed, transformer.transformer_blocks.3, .* and 10 more; a default",
        ),
        (
            {"transformer.transformer_blocks.0.ff": 1, "vae": 0},
            "must stay whole, but .*; give it one",
        ),
    ],
)
def test_map_that_cannot_work_is_refused_with_the_reason(device_map, reason):
    with pytest.raises(ArgumentError, match=reason) as caught:
        _devices(device_map)
    assert isinstance(caught.value, ValueError)


# The short map ------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 130), min_size=1))
def test_number_patterns_match_these_numbers_and_no_others(numbers):
    patterns = number_patterns([str(number) for number in sorted(numbers)])
    tree = (model("", *(block(str(number)) for number in range(131))),)
    devices = _devices({"": 0} | dict.fromkeys(patterns, 1), tree)
    assert {int(path) for path, device in devices.items() if device == "cuda:1"} == numbers
