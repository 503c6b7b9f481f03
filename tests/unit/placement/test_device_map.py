"""Device maps are read in every accepted form, the right key wins, and the print is shortest."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placing import block, blocks, components, flux, leaf, model

from shmload import ArgumentError, UnknownComponent
from shmload._placement.device_map import expand, parse_device_map
from shmload._placement.inventory import parse_inventory
from shmload._placement.modules import Component, parent_of
from shmload._placement.placement import place
from shmload._placement.shortest_map import number_patterns, print_device_map, shorten

INVENTORY = parse_inventory("4x80GiB")


def _devices(device_map, pipeline=None):
    return expand(parse_device_map(device_map, INVENTORY), pipeline or flux())


# Forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["balanced", "balanced_low_0", "sequential", "auto"])
def test_strategy_is_one(strategy):
    assert parse_device_map(strategy, INVENTORY) == strategy


@pytest.mark.parametrize("given", ["cuda:1", 1, "1", torch.device("cuda", 1)])
def test_device_is_for_all(given):
    assert set(_devices(given).values()) == {"cuda:1"}


@pytest.mark.parametrize("target", ["cpu", "meta", "disk", "offload"])
def test_targets_that_are_no_accelerators_stay_apart(target):
    devices = _devices({"": 0, "vae": target})
    assert devices["vae.decoder"] == target
    assert devices["text_encoder.embeddings"] == "cuda:0"


@pytest.mark.parametrize(
    "device_map",
    [
        {"": 0, "transformer.transformer_blocks.0": 1},
        {"": 0, "transformer": {"transformer_blocks.0": 1}},
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
        {"": 0, "text_encoder*": 1, "text_encoder": 2},
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
    alone = (model("", leaf("x"), blocks("blocks", 3)),)
    devices = _devices({"": 0, "blocks.[12]": 1}, alone)
    assert devices == {
        "x": "cuda:0",
        "blocks.0": "cuda:0",
        "blocks.1": "cuda:1",
        "blocks.2": "cuda:1",
    }


# Refusals -----------------------------------------------------------------------------------------


def test_unknown_component_is_told_the_known_ones_and_the_nearest():
    with pytest.raises(UnknownComponent) as caught:
        _devices({"transfrmer": 0, "": 0})
    assert str(caught.value) == (
        "the pipeline has no component 'transfrmer'; it has text_encoder, text_encoder_2, "
        "transformer, vae; did you mean 'transformer'?"
    )


def test_unknown_module_is_told_the_known_ones_and_the_nearest():
    with pytest.raises(ArgumentError) as caught:
        _devices({"": 0, "transformer.transformer_block.0": 1})
    assert "did you mean 'transformer_blocks'?" in str(caught.value)
    with pytest.raises(ArgumentError, match=r"transformer_blocks has no module '4'; it has 0 to 3"):
        _devices({"": 0, "transformer": {"transformer_blocks.4": 1}})
    with pytest.raises(ArgumentError, match=r"vae.decoder has no module 'x'; it cannot be divided"):
        _devices({"": 0, "vae.decoder.x": 1})
    with pytest.raises(ArgumentError, match="the model has no module 'y'; it has x"):
        _devices({"y": 0}, (model("", leaf("x")),))


@pytest.mark.parametrize(
    ("device_map", "reason"),
    [
        ("auot", "did you mean 'auto'"),
        ("gpu", r"'gpu' is not a device .*nor a strategy \(balanced.*; did you mean 'cuda'"),
        ({"": "gpu:1"}, r"meta, offload\); did you mean 'cuda'"),
        ({"": "cdua:1"}, "did you mean 'cuda'"),
        ("cuda:7", r"names cuda:7, and the devices are cuda:0, "),
        (None, "None is not a device"),
        ({"": "balanced"}, "for a whole pipeline"),
        ({"": 1.5}, "is not a device"),
        ({1: 0}, "its key 1 is not"),
        (functools.reduce(lambda inner, _: {"a": inner}, range(3000), 0), "more than 100 levels"),
        ({"transformer": {0: 1}}, "its key 0 is not"),
        ({"transformer": 0}, "says nothing of text_encoder, text_encoder_2, vae; a default"),
        (
            {"text*": 0, "vae": 0, "transformer": {"x_embedder": 0, "*_blocks.[0-2]": 1}},
            r"transformer.pos_embed, transformer.transformer_blocks.3, .* and 10 more; a default",
        ),
        ({"": 0, "transformer.transformer_blocks.0.ff": 1}, "transformer_blocks.0 must stay whole"),
        (
            {"transformer.transformer_blocks.0.ff": 1, "vae": 0},
            "transformer.transformer_blocks.0 must stay",
        ),
        ({"": 0, "text_encoder_2.shared": 1}, "share a tensor .*shared on cuda:1"),
    ],
)
def test_map_that_cannot_work_is_refused_with_the_reason(device_map, reason):
    with pytest.raises(ArgumentError, match=reason) as caught:
        _devices(device_map)
    assert isinstance(caught.value, ValueError)


def test_whole_module_with_modules_inside_its_submodules_is_not_cut():
    inner = parent_of("ff", (leaf("in"), leaf("out")))
    outer = parent_of("outer", (leaf("attn"), inner), is_whole=True)
    with pytest.raises(ArgumentError, match=r"outer must stay whole, but outer\.ff\.out "):
        _devices({"": 0, "outer.ff.out": 1}, (model("", outer),))
    with pytest.raises(ArgumentError, match=r"outer must stay whole, but outer\.ff would be"):
        _devices({"": 0, "outer.ff": 1}, (model("", outer),))
    assert _devices({"": 0}, (model("", outer),)) == {"outer": "cuda:0"}


def test_name_inside_a_whole_module_is_fine_where_nothing_is_cut():
    devices = _devices({"": 0, "transformer.transformer_blocks.0.ff": 0})
    assert set(devices.values()) == {"cuda:0"}


# The shortest map ---------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 130), min_size=1))
def test_number_patterns_match_these_numbers_and_no_others(numbers):
    patterns = number_patterns([str(number) for number in sorted(numbers)])
    tree = (model("", *(block(str(number)) for number in range(131))),)
    devices = _devices({"": 0} | dict.fromkeys(patterns, 1), tree)
    assert {int(path) for path, device in devices.items() if device == "cuda:1"} == numbers


@pytest.mark.parametrize(
    ("numbers", "patterns"),
    [
        (range(10), ["[0-9]"]),
        (range(11, 19), ["1[1-8]"]),
        (range(8, 20), ["[89]", "1[0-9]"]),
        (range(20, 40), ["[23][0-9]"]),
        (range(5, 38), ["[5-9]", "3[0-7]", "[12][0-9]"]),
        ([3], ["3"]),
    ],
)
def test_number_patterns_are_few(numbers, patterns):
    assert number_patterns(map(str, numbers)) == patterns


def test_map_is_as_short_as_can_be():
    written = {
        "text_encoder": "cuda:1",
        "text_encoder_2": "cuda:1",
        "transformer": "cuda:0",
        "transformer.single_transformer_blocks": "cuda:1",
        "transformer.single_transformer_blocks.[0-2]": "cuda:0",
        "vae": "cpu",
    }
    assert place(flux(), _devices(written), INVENTORY).device_map == written


def test_printed_map_is_python():
    device_map = {"transformer": "cuda:0", "transformer.blocks.[12]": "offload"}
    printed = print_device_map(device_map)
    assert printed == (
        'device_map = {\n    "transformer": "cuda:0",\n    "transformer.blocks.[12]": "offload",\n}'
    )
    names: dict[str, object] = {}
    exec(printed, names)
    assert names["device_map"] == device_map


@pytest.mark.slow
@given(st.data())
def test_shortest_map_means_the_same_and_is_no_longer(data):
    pipeline = tuple(Component(name=c.name, module=c.module) for c in data.draw(components()))
    long = {
        f"{c.name}.{path}".rstrip("."): data.draw(st.sampled_from(["cuda:0", "cuda:1", "offload"]))
        for c in pipeline
        for path, _ in c.module.units()
    }
    devices = expand(long, pipeline)
    assert devices == long
    main = {c.name: "cuda:0" for c in pipeline}
    short = shorten(pipeline, devices, main)
    assert expand(short, pipeline) == devices
    assert len(short) <= max(len(long), len(pipeline)) + len(pipeline)


def test_every_component_stands_in_the_map():
    placed = place(flux(), "cuda:2", INVENTORY)
    assert placed.device_map == dict.fromkeys(
        ("text_encoder", "text_encoder_2", "transformer", "vae"), "cuda:2"
    )


def test_own_tensor_beside_modules_has_a_place_of_its_own():
    pipeline = (model("transformer", leaf("scale_shift_table"), blocks("blocks", 2), leaf("out")),)
    placed = place(pipeline, {"": 0, "transformer.blocks.1": 1}, INVENTORY)
    assert placed.components["transformer"] == {
        "scale_shift_table": "cuda:0",
        "blocks.0": "cuda:0",
        "blocks.1": "cuda:1",
        "out": "cuda:0",
    }


def test_nested_blocks_are_listed_by_where_they_are():
    pipeline = (model("unet", parent_of("down", (blocks("0", 2), blocks("1", 2))), leaf("out")),)
    placed = place(pipeline, {"": 0, "unet.down.1": 1}, INVENTORY)
    assert placed.components["unet"] == {"down.0": "cuda:0", "down.1": "cuda:1", "out": "cuda:0"}
