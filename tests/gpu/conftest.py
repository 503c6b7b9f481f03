"""Fixtures of the tests of a device: each runs on a CUDA device, and on a stand-in without one.

`scripts/gpu-check` runs them on a GPU. The stand-in takes the name of a GPU and copies to memory of
the host, as late as it may. What only CUDA has is skipped there by name.
"""

import gc

import pytest
import torch
from devices import LateDevice

from shmload._building import placing
from shmload._devices import hooks
from shmload._placement import inventory
from shmload._placement.inventory import parse_inventory


class Cuda:
    """The first CUDA device."""

    tensor_device = "cuda:0"

    def allocated(self):
        torch.cuda.synchronize()
        return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))

    def fill_up(self, nbytes):
        """Leave room for this many bytes; returns a function that ends it."""
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(nbytes / total)
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0)

    def runtime(self):
        return placing.runtime_of(torch.device("cuda:0"))


class StandIn:
    """A device without a GPU: its tensors are on the host."""

    tensor_device = "cpu"

    def __init__(self, device):
        self._device = device

    def allocated(self):
        assert self._device.pending == 0
        assert not self._device.registered
        return self._device.allocated

    def fill_up(self, nbytes):
        self._device.room = self._device.allocated + nbytes

        def end():
            self._device.room = None

        return end

    def runtime(self):
        return self._device


@pytest.fixture(
    params=[
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
        "stand-in",
    ]
)
def device(request, monkeypatch):
    """The device that a test's pipelines go to, as `cuda:0`."""
    if request.param == "cuda":
        return Cuda()
    made = LateDevice()
    monkeypatch.setattr(placing, "runtime_of", lambda device: made)
    monkeypatch.setattr(inventory, "machine_inventory", lambda *_: parse_inventory("1GiB,cpu=8GiB"))
    _compute_on_the_host(monkeypatch)
    return StandIn(made)


def _compute_on_the_host(monkeypatch):
    """Have hooks move activations to the host, where the stand-in's tensors are."""
    attach = hooks.attach_hooks

    def attach_here(model, devices, execution_device, *others, **kwargs):
        here = {path: _here(device) for path, device in devices.items()}
        attach(model, here, _here(execution_device), *others, **kwargs)

    monkeypatch.setattr(placing, "attach_hooks", attach_here)


def _here(device):
    return "cpu" if device == "cuda:0" else device


@pytest.fixture
def base_line(device):
    """Return the bytes allocated on the device after a collection of garbage."""

    def measure():
        gc.collect()
        return device.allocated()

    return measure
