"""Pipelines whose weights wait on the host compute as the library's, from pages that are shared."""

import contextlib
import gc

import numpy as np
import peft
import pipelines
import pytest
import torch
from accelerated import call_flux, load, models_of
from comparing import reference
from torch import nn

import shmload
from shmload._building import placing
from shmload._devices.waiting import Waiting
from shmload._host.procfs import mappings_of
from shmload._host.shm import shm_names
from shmload._segments.segment import attach

pytestmark = pytest.mark.libraries

_PIPELINE = {"": "offload"}


@pytest.fixture
def device(accelerators, monkeypatch):
    """The device that the weights come to."""
    made = []

    class Noted(Waiting):
        def __init__(self, runtime):
            super().__init__(runtime)
            made.append(self)

    monkeypatch.setattr(placing, "Waiting", Noted)
    yield accelerators["cuda:0"]
    for waiting in made:  # the test's models live a little longer than the test
        waiting.release()


def flux(pipe):
    return call_flux(pipe.transformer)


@pytest.mark.parametrize("family", ["flux", "stable-diffusion", "wan"])
def test_generation_is_that_of_the_library(saved, device, family, evicts):
    source = saved(family)
    got = load(source, device_map=_PIPELINE, keep=True)
    assert got.hf_device_map == {"": "offload"}
    wanted = pipelines.run(reference(source, torch.bfloat16))
    for _ in range(2):
        assert np.array_equal(pipelines.run(got), wanted)
    assert device.registered
    assert device.calls.count("copy") > 20


@pytest.mark.parametrize(
    "where",
    [
        {"": 0, "transformer.transformer_blocks": "offload"},
        {"": 0, "transformer.single_transformer_blocks.1": "offload"},
        {"": "cpu", "transformer.transformer_blocks.0": "offload"},  # accelerate cannot
    ],
)
def test_some_blocks_wait(saved, device, where):
    source = saved("flux")
    got = load(source, device_map=where)
    assert torch.equal(flux(got), flux(reference(source, torch.bfloat16)))


def test_pages_are_the_segments_own(saved, device, evicts):
    """Other processes that pin them share them, because they are mapped shared."""
    got = load(saved("flux"), device_map=_PIPELINE, keep=True)
    pipelines.run(got)
    with contextlib.ExitStack() as closing:
        attached = filter(None, map(attach, shm_names()))
        inodes = {closing.enter_context(segment).inode for segment in attached}
    found = [there for there in mappings_of(inodes) if there.permissions == "r--s"]
    assert found
    shared = {(there.start, there.end) for there in found}
    pinned = {(start, -(-(start + n) // 4096) * 4096) for start, n in device.registered.items()}
    assert pinned == shared


@pytest.mark.parametrize("keep", [True, False])
def test_driver_that_registers_no_read_only_pages_gets_all_through_slots(
    saved, device, evicts, keep
):
    device._registers_read_only = False
    got = load(saved("flux"), device_map=_PIPELINE, keep=keep)
    assert torch.equal(flux(got), flux(reference(saved("flux"), torch.bfloat16)))
    assert device.registered  # slots
    with open("/proc/self/maps") as lines:
        assert not [line for line in lines if "rw-s" in line and "/shmload-" in line]


def test_model_that_waits_has_its_state(saved, device):
    got = load(saved("flux"), device_map=_PIPELINE)
    for name, model in models_of(reference(saved("flux"), torch.bfloat16)).items():
        found = models_of(got)[name].state_dict()
        assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_adapter_on_a_model_that_waits(saved, device):
    source = saved("flux")
    got = load(source, device_map=_PIPELINE)
    wanted = reference(source, torch.bfloat16)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    wanted.transformer.add_adapter(config)
    got.transformer.add_adapter(config)
    weights = {k: v for k, v in wanted.transformer.state_dict().items() if "lora" in k}
    got.transformer.load_state_dict(weights, strict=False)
    with_adapter = flux(wanted)
    assert torch.equal(flux(got), with_adapter)
    got.transformer.fuse_lora()
    wanted.transformer.fuse_lora()
    assert torch.equal(flux(got), flux(wanted))


def test_pages_go_with_the_component(saved, device):
    got = load(saved("flux"), device_map=_PIPELINE)
    pipelines.run(got)
    before = len(device.registered)
    got.text_encoder_2 = None
    gc.collect()
    assert 0 < len(device.registered) < before


def test_full_device_is_an_error_and_the_next_call_works(saved, device):
    got = load(saved("flux"), device_map=_PIPELINE)
    device.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        flux(got)
    device.room = None
    assert torch.equal(flux(got), flux(reference(saved("flux"), torch.bfloat16)))


def test_weights_in_no_segment_wait_too(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        wanted = model(torch.ones(1, 4))
        shmload.to_device(model, {"0": 0, "1": "offload"})
        assert torch.equal(model(torch.ones(1, 4)), wanted)


def test_slots_suit_the_largest_block(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1 << 18))
    with torch.no_grad():
        wanted = model(torch.ones(1, 4))
        shmload.to_device(model, {"": "offload"})
        assert torch.equal(model(torch.ones(1, 4)), wanted)
    assert max(device.registered.values()) >= model[1].weight.nbytes
