"""Every way to copy to a device keeps the contract, and only the table names the ways."""

import subprocess
import sys
from typing import get_args

import pytest
import torch
from devices import LateDevice
from torch import nn
from toy_way import TOY, ToyCopier
from way_contract import WayContract, hollow, segment  # noqa: F401 fixtures

from shmload._building import placing
from shmload._devices import calibration
from shmload._devices.calibration import choose_way
from shmload._devices.destination import Destination
from shmload._devices.ways import DEFAULT, WAYS, Pin, measured_ways, require_pin
from shmload._placement import inventory
from shmload._placement.inventory import parse_inventory
from shmload.errors import ArgumentError


@pytest.mark.parametrize("way", [load() for load in WAYS.values()], ids=list(WAYS))
class TestWays(WayContract):
    """All ways in the table keep the contract."""


@pytest.mark.parametrize("way", [TOY], ids=["toy"])
class TestToyWay(WayContract):
    """A way from outside shmload keeps the contract."""


# The table ----------------------------------------------------------------------------------------


def test_names_are_those_of_the_argument():
    assert get_args(Pin) == ("auto", *WAYS)
    assert [load().name for load in WAYS.values()] == list(WAYS)
    assert DEFAULT in WAYS


def test_unknown_way_is_refused():
    with pytest.raises(ArgumentError, match="auto, ring, register, off"):
        Destination(device_map="cuda", pin="fast")


def test_names_are_checked_without_torch():
    code = "import sys, shmload._devices.ways; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def toy(monkeypatch, configure, tmp_path):
    """Add a fourth way to the table."""
    configure(cache_dir=tmp_path)
    monkeypatch.setitem(WAYS, "toy", lambda: TOY)
    monkeypatch.setattr(ToyCopier, "copies", 0)
    monkeypatch.setattr(calibration, "_noted", set())


def test_row_is_all_that_a_fourth_way_needs(toy, monkeypatch):
    device = LateDevice()
    monkeypatch.setattr(placing, "runtime_of", lambda _: device)
    monkeypatch.setattr(inventory, "machine_inventory", lambda *_: parse_inventory("1GiB,cpu=8GiB"))
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wanted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    placing.to_device(module, "cuda:0", pin="toy")
    assert ToyCopier.copies == len(wanted)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in module.state_dict().items())


def test_fourth_way_is_named_and_measured(toy):
    require_pin("toy")
    with pytest.raises(ArgumentError, match="off, toy"):
        require_pin("fast")
    assert TOY in measured_ways()
    names = []
    for _ in measured_ways():
        choice = choose_way("auto", LateDevice(), 1 << 30)
        names.append(choice.way.name)
        choice.note(1.0, 0)
        calibration._noted.clear()
    assert names == [way.name for way in measured_ways()]
