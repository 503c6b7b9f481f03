"""Runtimes that need no GPU keep the contract, and unknown kinds of devices are refused."""

import logging
import subprocess
import sys

import generic_torch
import pytest
import torch
from devices import LateDevice
from runtime_contract import RuntimeContract

from shmload._runtimes.cuda import CudaRuntime
from shmload._runtimes.generic import GenericRuntime
from shmload._runtimes.kinds import KINDS, Kind, is_known, runtime_of
from shmload._runtimes.runtime import HostRuntime
from shmload.errors import ArgumentError, DeviceUnsupported


class TestHostRuntime(RuntimeContract):
    """The host, the stand-in for a device in `BENCH_DEVICE=pretend scripts/bench gpu`."""

    @pytest.fixture
    def runtime(self):
        return runtime_of(torch.device("cpu"))


@pytest.mark.parametrize("registers", [True, False])
class TestLateDevice(RuntimeContract):
    """The tests' fake device keeps the contract of real ones, and promises no more."""

    @pytest.fixture
    def runtime(self, registers):
        return LateDevice(registers=registers, pins=not registers)


class TestGenericRuntime(RuntimeContract):
    """A device that torch knows by its generic streams and events; the host copies here."""

    @pytest.fixture
    def runtime(self, monkeypatch):
        generic_torch.put_in(monkeypatch)
        return GenericRuntime(torch.device("cpu"))


# Any accelerator ----------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    return generic_torch.put_in(monkeypatch)


@pytest.mark.parametrize("kind", [GenericRuntime, CudaRuntime])
def test_lane_waits_for_the_consumer_and_events_for_the_lane(calls, kind):
    runtime = kind(torch.device("cpu"))
    calls.clear()
    target = runtime.empty(8)
    runtime.follow(3)
    runtime.copy(target, torch.ones(8, dtype=torch.uint8), 3)
    runtime.record(3).wait()
    runtime.join(3)
    runtime.follow(3)
    assert calls == [
        "make stream 0",
        "stream 0 waits for the consumer",
        "stream 0 waits for the consumer",
        "copy on stream 0",
        "record on stream 0",
        "synchronize",
        "the consumer waits for stream 0",
        "stream 0 waits for the consumer",
    ]


def test_generic_device_whose_memory_torch_cannot_pin_says_so_once(calls, caplog):
    runtime = GenericRuntime(torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        assert [runtime.pinned(4096), runtime.pinned(4096)] == [None, None]
    (record,) = caplog.records
    assert "pins no memory for cpu" in record.message
    assert not runtime.register(0, 4096, read_only=False)


@pytest.mark.parametrize("kind", ["xpu", "mtia", "privateuseone"])
def test_kind_without_streams_is_refused_by_name(kind):
    """This torch is built without these kinds."""
    with pytest.raises(
        DeviceUnsupported, match=rf"weights to {kind}:1: it has no torch.Stream \("
    ) as e:
        runtime_of(torch.device(kind, 1))
    assert e.value.lacks == "torch.Stream"
    assert f".to('{kind}')" in str(e.value)


def test_kind_without_events_is_refused_by_name(calls, monkeypatch):
    def refuse(device):
        raise NotImplementedError("no events")

    monkeypatch.setattr(torch, "Event", refuse)
    with pytest.raises(DeviceUnsupported, match=r"no torch.Event \(no events\)") as caught:
        runtime_of(torch.device("xpu"))
    assert caught.value.lacks == "torch.Event"


def test_torch_without_generic_streams_is_named(monkeypatch):
    monkeypatch.delattr(torch, "accelerator")
    with pytest.raises(DeviceUnsupported, match=r"install torch 2\.6 or later") as caught:
        runtime_of(torch.device("xpu"))
    assert caught.value.lacks == "torch.accelerator"


def test_kind_that_a_package_adds_is_known(calls, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "hpu_of_somebody")
    assert is_known("hpu_of_somebody")
    assert not is_known("vulkan")
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "vulkan")
    assert isinstance(runtime_of(torch.device("vulkan")), GenericRuntime)


def test_device_that_has_the_hosts_memory_needs_no_copies():
    with pytest.raises(DeviceUnsupported, match="uses the memory of the host") as caught:
        runtime_of(torch.device("mps"))
    assert caught.value.lacks == ""


def test_other_kinds_are_refused():
    with pytest.raises(ArgumentError, match=r"cuda, cpu, .*, and not to vulkan"):
        runtime_of(torch.device("vulkan"))


def test_row_is_all_that_a_kind_needs(monkeypatch):
    monkeypatch.setitem(KINDS, "xpu", Kind(lambda: HostRuntime))
    assert isinstance(runtime_of(torch.device("xpu:1")), HostRuntime)


def test_kinds_are_checked_without_torch():
    code = "import sys, shmload._runtimes.kinds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
