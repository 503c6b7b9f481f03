"""Runtimes that need no GPU keep the contract, and unknown kinds of devices are refused."""

import subprocess
import sys

import generic_torch
import pytest
import torch
from devices import LateDevice
from runtime_contract import RuntimeContract

from shmload._runtimes.cuda import CudaRuntime
from shmload._runtimes.kinds import KINDS, Kind, is_known, runtime_of
from shmload._runtimes.runtime import Runtime
from shmload.errors import ArgumentError


@pytest.mark.parametrize("registers", [True, False])
class TestLateDevice(RuntimeContract):
    """The tests' fake device keeps the contract of real ones, and promises no more."""

    @pytest.fixture
    def runtime(self, registers):
        return LateDevice(registers=registers, locks=not registers)


class TestRuntime(RuntimeContract):
    """A device that torch knows by its generic streams and events; the host copies here."""

    @pytest.fixture
    def runtime(self, monkeypatch):
        generic_torch.put_in(monkeypatch)
        return Runtime(torch.device("cpu"))


# Any accelerator ----------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    return generic_torch.put_in(monkeypatch)


@pytest.mark.parametrize("kind", [Runtime, CudaRuntime])
def test_copies_wait_for_the_consumer_and_events_for_the_copies(calls, kind):
    runtime = kind(torch.device("cpu"))
    name = runtime._stream.name
    assert calls[-2:] == [f"make {name}", f"{name} waits for the consumer"]
    calls.clear()
    target = runtime.empty(8)
    runtime.follow()
    runtime.copy([(target, torch.ones(8, dtype=torch.uint8))])
    runtime.record().synchronize()
    runtime.join()
    assert calls == [
        f"{name} waits for the consumer",
        f"copy on {name}",
        f"record on {name}",
        "synchronize",
        f"the consumer waits for {name}",
    ]
    assert torch.equal(target, torch.ones(8, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["xpu", "mtia", "privateuseone"])
def test_kind_without_streams_is_refused_by_name(kind):
    """This torch is built without these kinds."""
    with pytest.raises(
        ArgumentError, match=rf"weights to {kind}:1: it has no torch.Stream \("
    ) as e:
        runtime_of(torch.device(kind, 1))
    assert e.value.lacks == "torch.Stream"
    assert f".to('{kind}')" in str(e.value)


def test_kind_without_events_is_refused_by_name(calls, monkeypatch):
    def refuse(device):
        raise NotImplementedError("no events")

    monkeypatch.setattr(torch, "Event", refuse)
    with pytest.raises(ArgumentError, match=r"no torch.Event \(no events\)") as caught:
        runtime_of(torch.device("xpu"))
    assert caught.value.lacks == "torch.Event"


def test_torch_without_generic_streams_is_named(monkeypatch):
    monkeypatch.delattr(torch, "accelerator")
    with pytest.raises(ArgumentError, match=r"install torch 2\.6 or later") as caught:
        runtime_of(torch.device("xpu"))
    assert caught.value.lacks == "torch.accelerator"


def test_kind_that_a_package_adds_is_known(calls, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "hpu_of_somebody")
    assert is_known("hpu_of_somebody")
    assert not is_known("vulkan")
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "vulkan")
    assert isinstance(runtime_of(torch.device("vulkan")), Runtime)


def test_device_that_has_the_hosts_memory_needs_no_copies():
    with pytest.raises(ArgumentError, match="uses the memory of the host") as caught:
        runtime_of(torch.device("mps"))
    assert caught.value.lacks == ""


def test_other_kinds_are_refused():
    with pytest.raises(ArgumentError, match=r"cuda, cpu, .*, and not to vulkan"):
        runtime_of(torch.device("vulkan"))


def test_row_is_all_that_a_kind_needs(monkeypatch):
    class Own:
        def __init__(self, device):
            self.device = device

    monkeypatch.setitem(KINDS, "xpu", Kind(lambda: Own))
    assert runtime_of(torch.device("xpu:1")).device == torch.device("xpu:1")


def test_kinds_are_checked_without_torch():
    code = "import sys, shmload._runtimes.kinds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
