"""Feeding a device from segments' own pages, and finding out whether that is the quickest way."""

import mmap
import os

import pytest
import torch
from devices import LateDevice
from torch import nn

from shmload._host.linux import inode_of
from shmload.errors import ArgumentError
from shmload.integrations._devices import registered
from shmload.integrations._devices.calibration import choose_pin
from shmload.integrations._devices.destination import Destination
from shmload.integrations._devices.moves import Moves
from shmload.integrations._devices.registered import copy_registered

_LARGE = 600_000


@pytest.fixture
def mapped():
    """A module over a file: two large tensors, and two that share an allocation."""
    fd = os.memfd_create("segment")
    os.pwrite(fd, bytes(i % 251 for i in range(2 * _LARGE + 4096)), 0)
    content = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    module = nn.Module()
    for name, begin, end in (
        ("first", 4096, 4096 + _LARGE),
        ("second", 4096 + _LARGE, 4096 + 2 * _LARGE),
        ("small", 0, 100),
        ("smaller", 100, 110),
    ):
        tensor = torch.frombuffer(content, dtype=torch.uint8, count=end - begin, offset=begin)
        module.register_buffer(name, tensor)
    yield module, [(inode_of(os.fstat(fd)), fd)]
    os.close(fd)


def test_large_tensors_are_copied_from_the_segment_itself(mapped):
    module, files = mapped
    wanted = {name: tensor.clone() for name, tensor in module.named_buffers()}
    device = LateDevice()
    moves = Moves([(module, lambda path: device)])
    device.calls.clear()
    left = copy_registered(moves.staged, files)
    assert device.calls == ["register", "copy", "copy", "wait", "unregister"]
    assert device.pending == 0
    assert [[move.nbytes for move in there.moves] for there in left] == [[100, 10]]
    moves.commit()
    assert torch.equal(module.first, wanted["first"])
    assert torch.equal(module.second, wanted["second"])


def test_file_larger_than_a_window_is_registered_in_pieces(mapped, monkeypatch):
    monkeypatch.setattr(registered, "_WINDOW_NBYTES", 128 << 10)
    module, files = mapped
    wanted = {name: tensor.clone() for name, tensor in module.named_buffers()}
    device = LateDevice()
    moves = Moves([(module, lambda path: device)])
    device.calls.clear()
    most = []
    register = device.register

    def note(*args, **kwargs):
        most.append(len(device.registered))
        return register(*args, **kwargs)

    device.register = note
    left = copy_registered(moves.staged, files)
    assert len(left) == 1
    assert device.calls.count("register") == device.calls.count("unregister") == 10
    assert max(most) == 1  # one is fetched from while the next is registered
    assert device.pending == 0
    moves.commit()
    assert torch.equal(module.first, wanted["first"])
    assert torch.equal(module.second, wanted["second"])


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_failure_in_some_window_releases_all(mapped, monkeypatch, fails_at):
    monkeypatch.setattr(registered, "_WINDOW_NBYTES", 128 << 10)
    module, files = mapped
    device = LateDevice(fails_at=fails_at)
    moves = Moves([(module, lambda path: device)])
    with pytest.raises(torch.OutOfMemoryError):
        copy_registered(moves.staged, files)
    assert device.pending == 0
    assert not device.registered


def test_segment_that_was_written_to_is_left_alone(mapped):
    module, files = mapped
    module.second[0] = 7  # in a page of this process's own
    device = LateDevice()
    moves = Moves([(module, lambda path: device)])
    device.calls.clear()
    assert copy_registered(moves.staged, files) == moves.staged
    assert device.calls == []


def test_tensor_outside_of_the_files_is_left_alone(mapped):
    module, files = mapped
    module.other = nn.Parameter(torch.zeros(_LARGE))
    device = LateDevice()
    moves = Moves([(module, lambda path: device)])
    left = copy_registered(moves.staged, files)
    assert [there.moves[0].nbytes for there in left] == [4 * _LARGE, 100]


def test_refused_pages_leave_all_to_the_ring(mapped):
    module, files = mapped
    device = LateDevice(registers=False)
    moves = Moves([(module, lambda path: device)])
    assert copy_registered(moves.staged, files) == moves.staged
    assert device.pending == 0


def test_failure_in_the_middle_releases_the_pages(mapped):
    module, files = mapped
    device = LateDevice(fails_at=1)
    moves = Moves([(module, lambda path: device)])
    with pytest.raises(torch.OutOfMemoryError):
        copy_registered(moves.staged, files)
    assert device.pending == 0
    assert not device.registered


# Calibration --------------------------------------------------------------------------------------


@pytest.fixture
def memory(configure, tmp_path):
    configure(cache_dir=tmp_path)
    return tmp_path / "pins"


@pytest.mark.parametrize("pin", ["ring", "register", "off"])
def test_what_is_asked_for_is_not_measured(memory, pin):
    device = LateDevice()
    assert choose_pin(pin, device) == pin
    assert device.calls == []


def test_unknown_way_is_refused():
    with pytest.raises(ArgumentError, match="auto, ring, register, off"):
        Destination(device_map="cuda", pin="fast")


def test_it_is_measured_once(memory):
    device = LateDevice()
    found = choose_pin("auto", device, sample_nbytes=4 << 20)
    assert found in ("ring", "register")
    assert device.pending == 0
    assert not device.registered
    again = LateDevice()
    assert choose_pin("auto", again) == found
    assert again.calls == []
    (remembered,) = memory.iterdir()
    assert remembered.read_text() == found


def test_what_was_remembered_is_used(memory):
    choose_pin("auto", LateDevice(), sample_nbytes=1 << 20)
    (remembered,) = memory.iterdir()
    remembered.write_text("register")
    assert choose_pin("auto", LateDevice()) == "register"
    remembered.write_text("rubbish")
    assert choose_pin("auto", LateDevice(), sample_nbytes=1 << 20) in ("ring", "register")


def test_way_that_is_impossible_is_not_chosen(memory):
    assert choose_pin("auto", LateDevice(registers=False), sample_nbytes=1 << 20) == "ring"


def test_device_without_room_for_the_sample_is_asked_again(memory):
    assert choose_pin("auto", LateDevice(fails_at=0), sample_nbytes=1 << 20) == "ring"
    assert not memory.exists()


def test_memory_that_cannot_be_written_is_no_error(memory, configure):
    configure(cache_dir="/proc/nowhere")
    assert choose_pin("auto", LateDevice(), sample_nbytes=1 << 20) in ("ring", "register")
