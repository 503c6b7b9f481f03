"""Loads find the fastest way to a device; their rates are remembered for a time."""

import time

import pytest
from devices import LateDevice

from shmload._devices import calibration
from shmload._devices.calibration import choose_way
from shmload._devices.ways import WAYS, measured_ways
from shmload._host.memo import Memo

MEASURED = [way.name for way in measured_ways()]
LARGE = 1 << 30


@pytest.fixture
def memory(configure, tmp_path, monkeypatch):
    configure(cache_dir=tmp_path)
    monkeypatch.setattr(calibration, "_noted", set())
    return tmp_path / "pins"


@pytest.fixture
def new_process(monkeypatch):
    return lambda: monkeypatch.setattr(calibration, "_noted", set())


def copy(elapsed_s, device=None, nbytes=LARGE, other_nbytes=0):
    """Choose a way for a copy that takes some time, and note that; return the way's name."""
    choice = choose_way("auto", device or LateDevice(), nbytes)
    choice.note(elapsed_s, other_nbytes)
    return choice.way.name


def remembered(memory):
    (file,) = memory.iterdir()
    return Memo.of_key("pins", calibration._Rates, file.name).read()


@pytest.mark.parametrize("pin", list(WAYS))
def test_what_is_asked_for_is_not_measured(memory, pin):
    device = LateDevice()
    choice = choose_way(pin, device, LARGE)
    choice.note(1.0, 0)
    assert choice.way.name == pin
    assert device.calls == []
    assert not memory.exists()


def test_rate_is_that_of_the_way_that_most_bytes_took(memory, new_process):
    assert copy(1.0) == "ring"
    new_process()
    # Nothing could be registered, so this was no measurement of it.
    assert copy(0.5, other_nbytes=LARGE) == "register"
    new_process()
    assert copy(0.5, other_nbytes=LARGE // 8) == "register"
    new_process()
    rates = remembered(memory).first
    assert {name: rate.bytes_per_s for name, rate in rates.items()} == {
        "ring": LARGE / 0.5,
        "register": LARGE / 0.5,
    }


def test_small_copies_take_the_ring_and_are_not_measured(memory):
    device = LateDevice()
    assert [copy(1.0, device, 100 << 20) for _ in range(3)] == ["ring"] * 3
    assert device.calls == []
    assert not memory.exists()


@pytest.mark.parametrize("quickest", MEASURED)
def test_each_way_is_tried_once_and_the_quickest_stays(memory, new_process, quickest):
    tried = []
    for _ in MEASURED:
        tried.append(copy(1.0 if len(tried) == MEASURED.index(quickest) else 2.0))
        new_process()
    assert tried == MEASURED
    for nbytes in (LARGE, 1 << 20):
        assert copy(1.0, nbytes=nbytes) == quickest
        new_process()


def test_to_choose_copies_nothing(memory):
    device = LateDevice()
    copy(1.0, device)
    assert device.calls == []


def test_first_and_later_copies_of_a_process_are_remembered_apart(memory, new_process):
    assert [copy(9.0), copy(1.0), copy(2.0)] == ["ring", "ring", "register"]
    new_process()
    assert copy(5.0) == "register"  # of first copies only the ring's is known
    assert copy(1.0) == "ring"
    new_process()
    assert copy(5.0) == "register"
    assert copy(1.0) == "ring"


def test_way_that_became_slow_is_left(memory, new_process):
    for elapsed_s in (1.0, 2.0, 3.0):
        copy(elapsed_s)
        new_process()
    assert copy(1.0) == "register"


def test_rates_expire(memory, new_process, monkeypatch):
    for _ in MEASURED:
        copy(1.0)
        new_process()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + calibration._EXPIRES_S + 1)
    assert copy(1.0) == "ring"
    new_process()
    assert copy(0.5) == "register"
    new_process()
    assert copy(1.0) == "register"


@pytest.mark.parametrize("fact", ["name", "driver"])
def test_other_device_or_driver_is_measured_anew(memory, new_process, fact):
    for elapsed_s in (2.0, 1.0):
        copy(elapsed_s)
        new_process()
    other = LateDevice()
    setattr(other, fact, "another")
    assert copy(1.0) == "register"
    new_process()
    assert copy(1.0, other) == "ring"
    assert len(list(memory.iterdir())) == 2


def test_way_that_is_impossible_is_not_tried(memory, new_process):
    for _ in range(3):
        device = LateDevice(registers=False)
        assert copy(1.0, device) == "ring"
        new_process()


@pytest.mark.parametrize("content", [b"ring", b"", b"{}", b'{"first": {"old way": [1, 2]}}'])
def test_memory_that_makes_no_sense_is_forgotten(memory, content):
    copy(1.0)
    (file,) = memory.iterdir()
    file.write_bytes(content)
    calibration._noted.clear()
    assert copy(1.0) == "ring"
    assert remembered(memory).first.keys() == {"ring"}


def test_memory_that_cannot_be_written_is_no_error(memory, configure):
    configure(cache_dir="/proc/nowhere")
    assert copy(1.0) == "ring"
