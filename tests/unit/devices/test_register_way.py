"""The way `register` copies from segments' own pages, and registers the right pages in time."""

import mmap
import os
import stat

import pytest
import torch
from devices import LateDevice, is_writable
from torch import nn

from shmload._devices import register_way
from shmload._devices.moves import Moves
from shmload._devices.register_way import copy_registered
from shmload._host.descriptors import inode_of
from shmload._host.shm import reopen

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
    assert device.calls == [
        *("register", "unregister"),  # a page, to find out whether it can
        *("follow", "register", "copy", "copy", "wait", "unregister"),
    ]
    assert device.pending == 0
    assert [[move.nbytes for move in there.moves] for there in left] == [[100, 10]]
    moves.commit()
    assert torch.equal(module.first, wanted["first"])
    assert torch.equal(module.second, wanted["second"])


# Drivers that register no read-only pages ---------------------------------------------------------


def open_to_read(files):
    """Return the files as a process has them that did not build them; it closes them."""
    return [(inode, reopen(fd)) for inode, fd in files]


@pytest.mark.parametrize(("read_only", "asked"), [("yes", 1), ("no", 1), ("refused", 2)])
def test_window_is_writable_only_while_it_is_registered(mapped, read_only, asked):
    module, files = mapped
    wanted = {name: tensor.clone() for name, tensor in module.named_buffers()}
    device = LateDevice(read_only=read_only)
    at_copies = []
    copy = device.copy
    device.copy = lambda target, source, lane: (
        at_copies.append(is_writable(source.data_ptr())),
        copy(target, source, lane),
    )
    moves = Moves([(module, lambda path: device)])
    assert len(copy_registered(moves.staged, files)) == 1
    assert at_copies == [False, False]
    assert device.calls.count("register") == asked + 1  # a page first, then the one window
    assert not device.registered
    moves.commit()
    assert torch.equal(module.first, wanted["first"])


def test_file_that_is_no_segment_and_open_for_reading_is_never_opened_to_write(mapped):
    module, files = mapped
    os.fchmod(files[0][1], 0o400)
    device = LateDevice(read_only="no")
    moves = Moves([(module, lambda path: device)])
    lent = open_to_read(files)
    try:
        assert copy_registered(moves.staged, lent) == moves.staged
        assert stat.S_IMODE(os.fstat(files[0][1]).st_mode) == 0o400
    finally:
        os.close(lent[0][1])
    assert device.calls.count("register") == 1  # the page


def test_segment_that_was_attached_is_opened_to_map_and_stays_read_only(name, fd):
    content = bytes(i % 251 for i in range(_LARGE))
    os.pwrite(fd, content, 0)
    os.fchmod(fd, 0o500)
    attached = reopen(fd)
    module = nn.Module()
    mapping = mmap.mmap(attached, 0, access=mmap.ACCESS_COPY)
    module.register_buffer("only", torch.frombuffer(mapping, dtype=torch.uint8))
    device = LateDevice(read_only="refused")
    moves = Moves([(module, lambda path: device)])
    try:
        assert copy_registered(moves.staged, [(inode_of(os.fstat(attached)), attached)]) == []
    finally:
        os.close(attached)
    moves.commit()
    assert bytes(module.only.numpy()) == content
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o500
    assert os.pread(fd, _LARGE, 0) == content


def test_file_larger_than_a_window_is_registered_in_pieces(mapped, monkeypatch):
    monkeypatch.setattr(register_way, "_WINDOW_NBYTES", 128 << 10)
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
    assert device.calls.count("register") == device.calls.count("unregister") == 1 + 10
    # Some are copied and some registered; the one that is being registered does not count.
    assert 1 <= max(most) < register_way._COPYING + register_way._MAX_AHEAD
    assert device.pending == 0
    moves.commit()
    assert torch.equal(module.first, wanted["first"])
    assert torch.equal(module.second, wanted["second"])


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_failure_in_some_window_releases_all(mapped, monkeypatch, fails_at):
    monkeypatch.setattr(register_way, "_WINDOW_NBYTES", 128 << 10)
    module, files = mapped
    device = LateDevice(fails_at=fails_at)
    moves = Moves([(module, lambda path: device)])
    with pytest.raises(torch.OutOfMemoryError):
        copy_registered(moves.staged, files)
    assert device.pending == 0
    assert not device.registered


def test_segment_that_was_written_to_is_left_alone(mapped):
    module, files = mapped
    module.second[0] = 7  # copy-on-write: the page is private now
    device = LateDevice()
    moves = Moves([(module, lambda path: device)])
    device.calls.clear()
    assert copy_registered(moves.staged, files) == moves.staged
    assert device.calls == ["register", "unregister"]  # a page, to find out whether it can


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
