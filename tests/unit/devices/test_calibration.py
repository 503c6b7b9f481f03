"""Calibration finds the fastest way to copy to a device, once per machine."""

import pytest
from devices import LateDevice

from shmload.integrations._devices.calibration import choose_way
from shmload.integrations._devices.ways import WAYS, measured_ways

MEASURED = [way.name for way in measured_ways()]


@pytest.fixture
def memory(configure, tmp_path):
    configure(cache_dir=tmp_path)
    return tmp_path / "pins"


@pytest.mark.parametrize("pin", list(WAYS))
def test_what_is_asked_for_is_not_measured(memory, pin):
    device = LateDevice()
    assert choose_way(pin, device).name == pin
    assert device.calls == []


def test_what_may_not_be_measured_is_the_ring(memory):
    device = LateDevice()
    assert choose_way("auto", device, may_measure=False).name == "ring"
    assert device.calls == []
    assert not memory.exists()


def test_it_is_measured_once(memory):
    device = LateDevice()
    found = choose_way("auto", device, sample_nbytes=4 << 20).name
    assert found in MEASURED
    assert device.pending == 0
    assert not device.registered
    again = LateDevice()
    assert choose_way("auto", again).name == found
    assert again.calls == []
    (remembered,) = memory.iterdir()
    assert remembered.read_text() == found


def test_what_was_remembered_is_used(memory):
    choose_way("auto", LateDevice(), sample_nbytes=1 << 20)
    (remembered,) = memory.iterdir()
    remembered.write_text("register")
    assert choose_way("auto", LateDevice()).name == "register"
    remembered.write_text("rubbish")
    assert choose_way("auto", LateDevice(), sample_nbytes=1 << 20).name in MEASURED


def test_way_that_is_impossible_is_not_chosen(memory):
    assert choose_way("auto", LateDevice(registers=False), sample_nbytes=1 << 20).name != "register"


def test_device_without_room_for_the_sample_is_asked_again(memory):
    assert choose_way("auto", LateDevice(fails_at=0), sample_nbytes=1 << 20).name == "ring"
    assert not memory.exists()


def test_memory_that_cannot_be_written_is_no_error(memory, configure):
    configure(cache_dir="/proc/nowhere")
    assert choose_way("auto", LateDevice(), sample_nbytes=1 << 20).name in MEASURED
