"""A placement has each module once, no device over its limit, and splits where allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placing import UNIT, components, flux, inventories, leaf, limited, model

from shmload import DoesNotFit
from shmload._placement.device_map import expand
from shmload._placement.inventory import parse_inventory
from shmload._placement.modules import join
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
    for use in placement.devices:
        if use.limit_nbytes is not None:
            assert use.nbytes + use.passing_nbytes <= use.limit_nbytes
    for device in placement.execution_devices.values():
        assert device == "cpu" or inventory.find(device) in inventory.accelerators
    # Planning with the printed map gives the same placement; that also checks the ties.
    assert place(pipeline, placement.device_map, inventory) == placement
    devices = expand(_devices(placement), pipeline)
    for component in pipeline:
        if strategy == "auto" and not isinstance(placement.components[component.name], str):
            # It is cut between blocks alone: all else is on the device where it computes.
            units = component.module.units()
            rest = {join(component.name, path) for path, unit in units if not unit.is_whole}
            home = placement.execution_devices[component.name]
            assert {devices[path] for path in rest} <= {home}


def _assert_complete(pipeline, placement):
    assert list(placement.components) == [component.name for component in pipeline]
    devices = _devices(placement)
    for component in pipeline:
        for path, _ in component.module.units():
            # One entry is for the module, none for its submodules.
            unit = join(component.name, path)
            assert len([d for d in devices if unit == d or unit.startswith(f"{d}.")]) == 1
        parts = [part for part in placement.parts if part.component == component.name]
        assert sum(part.nbytes for part in parts) == component.nbytes
    total = sum(component.nbytes for component in pipeline)
    assert sum(use.nbytes for use in placement.devices) == total


# Strategies ---------------------------------------------------------------------------------------


def _whole(strategy, text):
    return place(flux(), strategy, parse_inventory(text)).components


def test_balanced_low_0_keeps_the_first_device_free():
    assert set(_whole("balanced_low_0", "2x60MiB").values()) == {"cuda:1"}
    # cuda:0 is used when the others are full.
    assert _whole("balanced_low_0", "2x40MiB")["text_encoder_2"] == "cuda:0"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_compute_on_the_cpu_where_there_is_nothing_else(strategy):
    assert set(_whole(strategy, "cpu=1GiB").values()) == {"cpu"}


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
    placement = place(flux(), "auto", parse_inventory("24MiB,cpu=50MiB"))
    devices = set(placement.components["transformer"].values())
    assert devices == {"cuda:0", "offload"}
    assert placement.components["text_encoder_2"] == "offload"
    assert _units(placement)["cuda:0"] >= 18


def test_headroom_is_kept_by_strategies_and_not_by_explicit_maps():
    pipeline = (model("transformer", leaf("x", 23)),)
    with pytest.raises(DoesNotFit):
        place(pipeline, "balanced", parse_inventory("24MiB"))
    for device_map, inventory in (("cuda:0", parse_inventory("24MiB")), ("balanced", limited(24))):
        assert place(pipeline, device_map, inventory).components == {"transformer": "cuda:0"}


# Where what waits is computed ---------------------------------------------------------------------


def test_computed_on_the_cpu_and_kept_on_the_cpu_are_told_apart():
    placement = place(flux(), {"": "offload", "vae": "cpu"}, parse_inventory("1x24MiB"))
    assert placement.execution_devices["vae"] == "cpu"
    assert placement.execution_devices["transformer"] == "cuda:0"
    assert _units(placement) == {"cuda:0": 0, "cpu": 44}
    assert placement.devices[0].passing_nbytes == 2 * UNIT


def test_what_waits_is_computed_by_an_accelerator():
    inventory = parse_inventory("24MiB,40MiB")
    mixed = {"": "offload", "transformer.x_embedder": "cpu", "vae": 0}
    found = place(flux(), mixed, inventory).execution_devices
    assert list(found.values()) == ["cuda:1", "cuda:1", "cuda:1", "cuda:0"]
    mixed["transformer.proj_out"] = 0
    assert place(flux(), mixed, inventory).execution_devices["transformer"] == "cuda:0"


# What does not fit --------------------------------------------------------------------------------


def test_what_fits_nowhere_is_an_error_with_the_numbers_and_a_way_out():
    inventory = parse_inventory("2x28MiB")
    with pytest.raises(DoesNotFit) as caught:
        place(flux(), "balanced", inventory)
    message = str(caught.value)
    assert "'balanced' finds no device for transformer (30.00 MiB); left are 13.20 MiB" in message
    assert caught.value.needed == 30 * UNIT
    assert caught.value.available < 26 * UNIT
    assert place(flux(), caught.value.device_map, inventory) == place(flux(), "auto", inventory)
    assert isinstance(caught.value, OSError)


def test_what_not_even_auto_can_place_names_what_would_help():
    with pytest.raises(DoesNotFit, match="take more or larger devices, a narrower dtype") as caught:
        place(flux(), "auto", parse_inventory("2x4MiB,cpu=4MiB"))
    assert caught.value.device_map is None
