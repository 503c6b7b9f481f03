"""Device maps place whole pipelines as asked, and bad ones are refused."""

import pytest
import torch
from accelerated import assert_as_on_the_host, assert_as_on_the_host_but_for_notes, load, models_of
from comparing import reference

import shmload
from shmload._loading.load import Load
from shmload._placement import inventory
from shmload._placement.inventory import parse_inventory

pytestmark = pytest.mark.libraries


def test_components_go_where_the_map_says(saved, accelerators):
    source = saved("flux")
    got = load(source, device_map={"transformer": 1, "text_encoder*": "cuda:0", "vae": "cpu"})
    assert got.hf_device_map == {
        "transformer": "cuda:1",
        "text_encoder": "cuda:0",
        "text_encoder_2": "cuda:0",
        "vae": "cpu",
    }
    assert got.transformer._hf_hook.execution_device == torch.device("cuda:1")
    sizes = {
        name: sum(p.nbytes for p in model.parameters()) for name, model in models_of(got).items()
    }
    assert all(sizes.values())
    with pytest.raises(ValueError, match="device mapping strategy"):
        got.to("cpu")
    got.reset_device_map()
    assert not hasattr(got.transformer, "_hf_hook")
    assert got.hf_device_map is None
    assert_as_on_the_host_but_for_notes(got, reference(source, torch.bfloat16))


@pytest.mark.parametrize("strategy", ["balanced", "auto"])
def test_strategy_that_needs_no_host_streams(saved, accelerators, streams, strategy):
    got = load(saved("flux"), device_map=strategy, max_host_memory="64KiB")
    assert streams
    assert set(got.hf_device_map.values()) <= {"cuda:0", "cuda:1"}
    assert_as_on_the_host_but_for_notes(got, reference(saved("flux"), torch.bfloat16))


def test_cpu_for_everything_copies_nothing(saved, accelerators):
    source = saved("flux")
    got = load(source, device_map="cpu")
    assert got.hf_device_map == {"": "cpu"}
    assert accelerators["cuda:0"].calls == []
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"device_map": {"": 0, "vae": "cpu"}},
        {"device_map": "balanced", "max_memory": {"cpu": "1GiB"}},
        {"device_map": None},
        {"keep": True},
        {"verify": True},
        {"use_safetensors": False},
    ],
    ids=str,
)
def test_limit_for_the_host_needs_a_way_off_it(saved, accelerators, arguments):
    with pytest.raises(shmload.ArgumentError, match="max_host_memory"):
        load(saved("flux"), max_host_memory="1MiB", **arguments)


@pytest.mark.parametrize("device_map", ["cuda", {"": "cpu", "vae": 0}])
def test_missing_gpu_is_found_before_anything_is_decoded(saved, monkeypatch, device_map):
    monkeypatch.setattr(inventory, "machine_inventory", lambda *_: parse_inventory("cpu=8GiB"))
    monkeypatch.setattr(Load, "__init__", None)  # no load is begun
    with pytest.raises(shmload.ArgumentError, match=r"names cuda:0, .*are cpu; take one of these"):
        shmload.load_pipeline(saved("flux"), device_map=device_map)
