"""A placement has each module once, no device over its limit, and splits where allowed."""

import pytest
from accelerate.utils import (
    calculate_maximum_sizes,
    check_device_map,
    compute_module_sizes,
    get_balanced_memory,
    infer_auto_device_map,
)
from hypothesis import given
from hypothesis import strategies as st
from placing import UNIT, blocks, components, flux, inventories, leaf, model

from shmload import ArgumentError, DoesNotFit
from shmload._placement.device_map import expand
from shmload._placement.inventory import limit_inventory, parse_inventory
from shmload._placement.modules import Component, join
from shmload._placement.placement import place

STRATEGIES = ("balanced", "balanced_low_0", "sequential", "auto")


def _units(placement):
    return {use.device: use.nbytes / UNIT for use in placement.devices}


def _devices(placement):
    """Return the device of every module that has one, by dotted path."""
    found = {}
    for component, placed in placement.components.items():
        paths = {"": placed} if isinstance(placed, str) else placed
        found |= {join(component, path): device for path, device in paths.items()}
    return found


def _homes(paths, devices):
    """Return the entries of a placement for a module or one of its parents."""
    return [d for d in devices if any(p == d or p.startswith(f"{d}.") for p in paths)]


# Promises -----------------------------------------------------------------------------------------


@given(components(), inventories(), st.sampled_from(STRATEGIES))
def test_placement_keeps_its_promises(pipeline, text, strategy):
    inventory = parse_inventory(text)
    try:
        placement = place(pipeline, strategy, inventory)
    except DoesNotFit as exc:
        if exc.device_map is None:
            return
        assert strategy != "auto"
        # The device map that the error proposes fits.
        placement = place(pipeline, exc.device_map, inventory)
        assert placement == place(pipeline, "auto", inventory)
    _assert_complete(pipeline, placement)
    _assert_within_limits(pipeline, placement, inventory)
    _assert_ties_together(pipeline, placement)
    # Planning with the printed map gives the same placement.
    assert place(pipeline, placement.device_map, inventory) == placement


@pytest.mark.slow
@given(components(), st.data())
def test_explicit_map_is_followed(pipeline, data):
    inventory = parse_inventory("2x10GiB")
    computing = ["cuda:0", "cuda:1", "meta"]
    untied = [Component(name=c.name, module=c.module) for c in pipeline]
    wanted = {}
    for c in untied:
        # Not both on the CPU and on the disk: see below.
        others = data.draw(st.sampled_from([["cpu", "offload"], ["offload", "disk"]]))
        for path, _ in c.module.units():
            wanted[join(c.name, path)] = data.draw(st.sampled_from([*computing, *others]))
    placement = place(untied, wanted, inventory)
    _assert_complete(untied, placement)
    assert expand(_devices(placement), untied) == wanted
    assert place(untied, placement.device_map, inventory) == placement


def _assert_complete(pipeline, placement):
    assert list(placement.components) == [component.name for component in pipeline]
    devices = _devices(placement)
    for component in pipeline:
        for path, _ in component.module.units():
            # One entry is for the module, none for its submodules.
            assert len(_homes([join(component.name, path)], devices)) == 1
        parts = [part for part in placement.parts if part.component == component.name]
        assert sum(part.nbytes for part in parts) == component.nbytes


def _assert_within_limits(pipeline, placement, inventory):
    for use in placement.devices:
        if use.limit_nbytes is not None:
            assert use.nbytes + use.passing_nbytes <= use.limit_nbytes
    total = sum(component.nbytes for component in pipeline)
    assert sum(use.nbytes for use in placement.devices) == total
    for device in placement.execution_devices.values():
        assert device == "cpu" or inventory.find(device) in inventory.accelerators


def _assert_ties_together(pipeline, placement):
    devices = _devices(placement)
    for component in pipeline:
        for tie in component.ties:
            homes = _homes([join(component.name, path) for path in tie], devices)
            assert len({devices[home] for home in homes}) == 1


@given(components(), inventories())
def test_planner_cuts_only_between_blocks(pipeline, text):
    try:
        placement = place(pipeline, "auto", parse_inventory(text))
    except DoesNotFit:
        return
    for component in pipeline:
        placed = placement.components[component.name]
        if isinstance(placed, str):
            continue
        devices = expand(_devices(placement), pipeline)
        rest = {
            devices[join(component.name, path)]
            for path, piece in component.module.units()
            if not piece.is_whole
        }
        # Everything outside the blocks is on the component's execution device.
        assert rest <= {placement.execution_devices[component.name]}


def test_blocks_go_in_runs():
    pipeline = (model("transformer", leaf("in"), blocks("blocks", 12), leaf("out")),)
    placement = place(pipeline, "auto", parse_inventory("3x12MiB"))
    assert [(part.modules, part.device) for part in placement.parts] == [
        ("rest", "cuda:0"),
        ("blocks.0-3", "cuda:0"),
        ("blocks.4-8", "cuda:1"),
        ("blocks.9-11", "cuda:2"),
    ]


# Strategies ---------------------------------------------------------------------------------------


def _whole(strategy, text, pipeline=None):
    return place(pipeline or flux(), strategy, parse_inventory(text)).components


def test_sequential_fills_one_device_after_the_other():
    assert _whole("sequential", "2x48MiB") == {
        "text_encoder": "cuda:0",
        "text_encoder_2": "cuda:0",
        "transformer": "cuda:0",
        "vae": "cuda:1",
    }
    assert _whole("sequential", "16MiB,40MiB")["transformer"] == "cuda:1"


def test_balanced_evens_out_the_shares_that_are_used():
    assert _whole("balanced", "2x48MiB") == {
        "text_encoder": "cuda:1",
        "text_encoder_2": "cuda:1",
        "transformer": "cuda:0",
        "vae": "cuda:1",
    }
    # The larger device takes more.
    placed = _whole("balanced", "40MiB,400MiB")
    assert placed["transformer"] == placed["text_encoder_2"] == "cuda:1"


def test_balanced_low_0_keeps_the_first_device_free():
    assert set(_whole("balanced_low_0", "2x60MiB").values()) == {"cuda:1"}
    # cuda:0 is used when the others are full.
    assert _whole("balanced_low_0", "2x40MiB")["text_encoder_2"] == "cuda:0"


def test_strategies_compute_on_the_cpu_where_there_is_nothing_else():
    for strategy in STRATEGIES:
        assert set(_whole(strategy, "cpu=1GiB").values()) == {"cpu"}


def test_auto_is_balanced_where_that_fits():
    assert _whole("auto", "2x50MiB") == _whole("balanced", "2x50MiB")


def test_auto_divides_what_fits_nowhere_whole():
    placement = place(flux(), "auto", parse_inventory("2x28MiB"))
    assert isinstance(placement.components["transformer"], dict)
    assert set(_devices(placement).values()) == {"cuda:0", "cuda:1"}
    # The split is as even as the blocks allow.
    low, high = sorted(_units(placement).values())
    assert high - low <= 3


def test_rest_of_a_divided_component_is_where_it_fits():
    pipeline = (model("transformer", leaf("in", 20), blocks("blocks", 4, 2), each_step=True),)
    placement = place(pipeline, "auto", limit_inventory({0: 10 * UNIT, 1: 24 * UNIT}))
    assert placement.components["transformer"]["in"] == "cuda:1"
    assert set(_devices(placement).values()) == {"cuda:0", "cuda:1"}


def test_auto_divides_over_no_more_devices_than_it_takes():
    placement = place(flux(), "auto", parse_inventory("4x24MiB"))
    assert len(set(placement.components["transformer"].values())) == 2


def test_auto_lets_wait_what_runs_once_before_what_runs_at_every_step():
    placement = place(flux(), "auto", parse_inventory("40MiB"))
    assert placement.components == {
        "text_encoder": "cuda:0",
        "text_encoder_2": "offload",
        "transformer": "cuda:0",
        "vae": "cuda:0",
    }
    assert placement.execution_devices["text_encoder_2"] == "cuda:0"


def test_auto_keeps_blocks_on_the_device_while_there_is_room():
    placement = place(flux(), "auto", parse_inventory("24MiB,cpu=14MiB,disk=50MiB"))
    devices = set(placement.components["transformer"].values())
    assert devices == {"cuda:0", "offload"}
    assert placement.components["text_encoder_2"] == "disk"  # the memory of the CPU is full
    assert _units(placement)["cuda:0"] >= 18


def test_block_that_is_too_large_keeps_no_other_off():
    pipeline = (model("unet", leaf("in"), blocks("a", 1, 9), blocks("b", 2, 2), each_step=True),)
    inventory = limit_inventory({0: 12 * UNIT, "cpu": 100 * UNIT})
    placed = place(pipeline, "auto", inventory).components["unet"]
    assert placed["a"] == "offload"
    assert placed["b"] == "cuda:0"


def test_largest_component_stays_where_no_name_says_what_runs_at_every_step():
    pipeline = (model("speaker", blocks("x", 3, 4)), model("listener", leaf("x", 30)))
    placement = place(pipeline, "auto", limit_inventory({0: 36 * UNIT}))
    assert placement.components == {"speaker": "offload", "listener": "cuda:0"}


def test_tied_blocks_go_together():
    tied = model("transformer", blocks("blocks", 8), ties=(("blocks.2.attn", "blocks.5.ff"),))
    placement = place((tied,), "auto", parse_inventory("2x14MiB"))
    placed = expand(_devices(placement), (tied,))
    assert len({placed[f"transformer.blocks.{number}"] for number in range(2, 6)}) == 1
    assert len(set(placed.values())) == 2


def test_headroom_is_kept_by_strategies_and_not_by_explicit_maps():
    pipeline = (model("transformer", leaf("x", 23)),)
    with pytest.raises(DoesNotFit):
        place(pipeline, "balanced", parse_inventory("24MiB"))
    assert place(pipeline, "cuda:0", parse_inventory("24MiB")).components == {
        "transformer": "cuda:0"
    }
    assert place(pipeline, "balanced", limit_inventory({0: "24MiB"})).components == {
        "transformer": "cuda:0"
    }


def test_computed_on_the_cpu_and_kept_on_the_cpu_are_told_apart():
    placement = place(flux(), {"": "offload", "vae": "cpu"}, parse_inventory("1x24MiB"))
    assert placement.execution_devices["vae"] == "cpu"
    assert placement.execution_devices["transformer"] == "cuda:0"
    assert _units(placement) == {"cuda:0": 0, "cpu": 44}
    assert placement.devices[0].passing_nbytes == 2 * UNIT


def test_what_waits_is_computed_by_an_accelerator():
    inventory = parse_inventory("24MiB,40MiB")
    mixed = {"": "offload", "transformer.x_embedder": "cpu", "vae": 0}
    assert place(flux(), mixed, inventory).execution_devices == {
        "text_encoder": "cuda:1",
        "text_encoder_2": "cuda:1",
        "transformer": "cuda:1",
        "vae": "cuda:0",
    }
    mixed["transformer.proj_out"] = 0
    assert place(flux(), mixed, inventory).execution_devices["transformer"] == "cuda:0"


def test_what_waits_on_a_disk_goes_with_no_module_that_the_cpu_computes():
    inventory = parse_inventory("24MiB,40MiB")
    mixed = {"": "cpu", "transformer.x_embedder": "disk", "vae": "offload"}
    with pytest.raises(ArgumentError, match=r"transformer .*cuda:1 while .*disk; write 'offload'"):
        place(flux(), mixed, inventory)
    # Without an accelerator the CPU computes in any case.
    place(flux(), mixed, parse_inventory("cpu=1GiB"))


def test_meta_takes_no_room():
    placement = place(flux(), "meta", parse_inventory("1KiB,cpu=1KiB"))
    assert set(placement.components.values()) == {"meta"}
    assert _units(placement) == {"cuda:0": 0, "cpu": 0}


# What does not fit --------------------------------------------------------------------------------


def test_what_fits_nowhere_is_an_error_with_the_numbers_and_a_way_out():
    inventory = parse_inventory("2x28MiB")
    with pytest.raises(DoesNotFit) as caught:
        place(flux(), "balanced", inventory)
    message = str(caught.value)
    assert "'balanced' finds no device for transformer (30.00 MiB): cuda:0 has " in message
    assert "of 25.20 MiB left, cuda:1 has " in message
    assert caught.value.needed == 30 * UNIT
    assert caught.value.available < 26 * UNIT
    assert place(flux(), caught.value.device_map, inventory) == place(flux(), "auto", inventory)
    assert isinstance(caught.value, OSError)


def test_full_device_of_an_explicit_map_is_an_error_with_what_is_there():
    with pytest.raises(DoesNotFit) as caught:
        place(flux(), {"": 0, "transformer": 1}, parse_inventory("2x20MiB"))
    assert "30.00 MiB on cuda:1 (transformer 30.00 MiB) exceed its 20.00 MiB" in str(caught.value)


def test_device_has_room_for_its_weights_and_for_those_that_pass_through_it():
    device_map = {"": 0, "text_encoder_2": "offload"}
    place(flux(), device_map, limit_inventory({0: 34 * UNIT}))
    with pytest.raises(DoesNotFit) as caught:
        place(flux(), device_map, limit_inventory({0: 33 * UNIT}))
    assert caught.value.needed == 34 * UNIT
    assert "vae 1.00 MiB, 2.00 MiB at a time that wait elsewhere) exceed" in str(caught.value)


def test_what_not_even_auto_can_place_names_what_would_help():
    with pytest.raises(DoesNotFit, match="take more or larger devices, a narrower dtype") as caught:
        place(flux(), "auto", parse_inventory("2x4MiB,cpu=4MiB,disk=0"))
    assert caught.value.device_map is None


def test_of_several_components_that_do_not_fit_none_is_lost():
    """diffusers' own `balanced` keeps only the last of them (0.30 to 0.42)."""
    pipeline = [model(f"encoder_{n}", leaf("x", 30 + n)) for n in range(3)]
    pipeline.append(model("transformer", leaf("x", 4)))
    with pytest.raises(DoesNotFit) as caught:
        place(pipeline, "balanced", parse_inventory("40MiB,cpu=1GiB"))
    assert "encoder_0 (30.00 MiB), encoder_1 (31.00 MiB)" in str(caught.value)
    placement = place(pipeline, "auto", parse_inventory("1x40MiB,cpu=1GiB"))
    assert len(placement.components) == 4
    assert sorted(placement.components.values()) == ["cuda:0", *["offload"] * 3]


# Beside accelerate --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flux_model():
    """A large Flux transformer on the meta device, described by accelerate and by shmload."""
    import diffusers
    import torch

    from shmload._building.module_trees import component_of

    with torch.device("meta"):
        made = diffusers.FluxTransformer2DModel(
            attention_head_dim=64, num_attention_heads=8, num_layers=6, num_single_layers=12
        )
    return made, component_of("transformer", made)


def test_sizes_are_those_of_accelerate(flux_model):
    made, component = flux_model
    wanted = compute_module_sizes(made)
    assert component.nbytes == wanted[""] == calculate_maximum_sizes(made)[0]
    for path, module in component.module.units():
        assert module.nbytes == wanted[path]


@pytest.mark.parametrize("share", [0.3, 0.4, 0.55, 0.8])
def test_what_accelerate_fits_on_gpus_we_do_no_worse(flux_model, share):
    made, component = flux_model
    limits = dict.fromkeys(range(4), int(component.nbytes * share))
    whole = made._no_split_modules
    balanced = get_balanced_memory(made, limits, no_split_module_classes=whole)
    theirs = infer_auto_device_map(made, balanced, no_split_module_classes=whole)
    assert "disk" not in theirs.values()
    ours = place([component], "auto", limit_inventory(limits))
    placed = ours.components["transformer"]
    # Each accepts the other's map.
    followed = place([component], {"transformer": theirs}, limit_inventory(limits))
    check_device_map(made, placed)
    assert all(use.nbytes <= limits[0] for use in (*ours.devices, *followed.devices))
    # accelerate uses all devices; shmload the fewest that hold the model, each to the same share.
    used = [use.nbytes for use in ours.devices if use.nbytes]
    block = max(module.nbytes for _, module in component.module.units())
    assert len(used) <= len(set(theirs.values()))
    assert max(used) - min(used) <= 2 * block


def test_what_accelerate_spills_we_spill_too(flux_model):
    made, component = flux_model
    limits = {0: component.nbytes // 3, "cpu": component.nbytes}
    whole = made._no_split_modules
    theirs = infer_auto_device_map(made, limits, no_split_module_classes=whole)
    assert set(theirs.values()) == {0, "cpu"}
    sizes = compute_module_sizes(made)
    ours = place([component], "auto", limit_inventory(limits))
    check_device_map(made, ours.components["transformer"])
    # At least as much stays on the GPU.
    kept = sum(sizes[path] for path, device in theirs.items() if device == 0)
    assert ours.devices[0].nbytes >= kept
