"""Runtimes that need no GPU keep the contract, and unknown kinds of devices are refused."""

import generic_torch
import pytest
import torch
from runtime_contract import RuntimeContract

from shmload._runtimes.kinds import is_known, runtime_of
from shmload._runtimes.runtime import Runtime
from shmload.errors import ArgumentError


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


@pytest.mark.parametrize("kind", ["xpu", "mtia", "privateuseone"])
def test_kind_without_streams_is_refused_by_name(kind):
    """This torch is built without these kinds."""
    with pytest.raises(
        ArgumentError, match=rf"weights to {kind}:1: it has no torch.Stream \("
    ) as e:
        runtime_of(torch.device(kind, 1))
    assert e.value.lacks == "torch.Stream"
    assert f".to('{kind}')" in str(e.value)


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
