"""Runtimes that need no GPU keep the contract, and unknown kinds of devices are refused."""

import subprocess
import sys

import pytest
import torch
from devices import LateDevice
from runtime_contract import RuntimeContract

from shmload.errors import ArgumentError
from shmload.integrations._devices.runtimes import RUNTIMES, runtime_of


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
        return LateDevice(registers=registers)


def test_other_kinds_are_refused():
    with pytest.raises(ArgumentError, match="cuda, cpu, and not to mps"):
        runtime_of(torch.device("mps"))


def test_row_is_all_that_a_kind_needs(monkeypatch):
    device = LateDevice()
    monkeypatch.setitem(RUNTIMES, "xpu", lambda _: device)
    assert runtime_of(torch.device("xpu:1")) is device


def test_kinds_are_checked_without_torch():
    code = "import sys, shmload.integrations._devices.runtimes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
