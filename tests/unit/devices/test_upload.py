"""Copies through a ring bring every byte, in any order of the device's copies."""

import pytest
import torch
from devices import LateDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shmload._decoding.ring import Ring, RingShape
from shmload._devices import upload as upload_module
from shmload._devices.moves import Moves
from shmload._devices.pinned import PinnedRing
from shmload._devices.upload import batches, upload


def module_of(*sizes):
    module = nn.Module()
    for number, size in enumerate(sizes):
        content = torch.arange(number, number + size, dtype=torch.int32).to(torch.uint8)
        module.register_buffer(f"b{number}", content)
    return module


def send(moves, shape, device):
    with Ring(shape) as ring, PinnedRing(ring, device) as pinned:
        upload(moves.staged, shape, pinned)


_sizes = st.lists(
    st.one_of(st.integers(1, 600), st.integers(500_000, 600_000)), min_size=1, max_size=12
)


@settings(max_examples=30)  # each example copies megabytes
@given(_sizes, st.integers(1, 9), st.sampled_from([4096, 8192, 65536, 1 << 20]))
def test_every_byte_arrives(sizes, slots, slot_nbytes):
    module = module_of(*sizes)
    wanted = {name: tensor.clone() for name, tensor in module.named_buffers()}
    device = LateDevice()
    moves = Moves([(module, lambda path: device)])
    send(moves, RingShape(slots, slot_nbytes), device)
    assert device.pending == 0
    moves.commit()
    for name, tensor in module.named_buffers():
        assert torch.equal(tensor, wanted[name])


@settings(max_examples=30)
@given(_sizes, st.sampled_from([4096, 65536]))
def test_batches_have_every_byte_once_and_fit_a_slot(sizes, slot_nbytes):
    device = LateDevice()
    allocations = Moves([(module_of(*sizes), lambda path: device)]).allocations
    ends = dict.fromkeys(allocations, 0)
    for batch in batches(allocations, slot_nbytes):
        used = 0
        for extent in batch:
            assert extent.begin == ends[extent.allocation] < extent.end
            assert extent.offset == used
            used += extent.end - extent.begin
            ends[extent.allocation] = extent.end
        assert used <= slot_nbytes
    assert all(end == allocation.used_nbytes for allocation, end in ends.items())


def test_several_devices_are_fed_at_once():
    module = module_of(600_000, 700_000, 10, 20)
    wanted = {name: tensor.clone() for name, tensor in module.named_buffers()}
    devices = [LateDevice(), LateDevice()]
    moves = Moves([(module, lambda path: devices[int(path[1]) % 2])])
    send(moves, RingShape(3, 65536), devices[0])
    moves.commit()
    assert [device.pending for device in devices] == [0, 0]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in module.named_buffers())


def test_each_slot_is_registered_when_it_is_first_used():
    device = LateDevice()
    moves = Moves([(module_of(600_000), lambda path: device)])
    device.calls.clear()
    pinned_at_copies = []
    copy = device.copy

    def note(target, source, lane):
        pinned_at_copies.append(source.data_ptr() in device.registered)
        copy(target, source, lane)

    device.copy = note
    send(moves, RingShape(64, 65536), device)
    assert pinned_at_copies == [True] * 10
    assert device.calls.count("register") <= 10  # and not 64: most slots are not needed
    assert device.calls.count("register") == device.calls.count("unregister")
    assert not device.registered


def test_refused_registration_is_no_error():
    device = LateDevice(registers=False)
    module = module_of(600_000)
    wanted = module.b0.clone()
    moves = Moves([(module, lambda path: device)])
    send(moves, RingShape(2, 65536), device)
    moves.commit()
    assert torch.equal(module.b0, wanted)
    assert "unregister" not in device.calls
    assert device.calls.count("register") <= 2  # at most once for each thread


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5])
@pytest.mark.parametrize("sizes", [(600_000, 100, 600_000), (524_288,) * 8])
def test_failure_in_the_middle_leaves_nothing_under_way(fails_at, sizes):
    device = LateDevice(fails_at=fails_at)
    module = module_of(*sizes)
    before = dict(module.named_buffers())
    moves = Moves([(module, lambda path: device)])
    with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        send(moves, RingShape(4, 1 << 18), device)
    assert device.pending == 0
    assert not device.registered
    assert all(tensor is before[name] for name, tensor in module.named_buffers())


@pytest.mark.parametrize(("nbytes", "lanes"), [(4096, 1), (3 * 65536, 3), (640_000, 4)])
def test_small_uploads_take_few_threads_and_each_thread_few_slots(monkeypatch, nbytes, lanes):
    monkeypatch.setattr(upload_module, "filler_count", lambda: 4)
    device = LateDevice()
    moves = Moves([(module_of(nbytes), lambda path: device)])
    device.calls.clear()
    send(moves, RingShape(64, 65536), device)
    assert device.calls.count("follow") == lanes
    assert device.calls.count("register") <= 3 * lanes


def test_lanes_follow_what_the_device_does_before_each_upload():
    device = LateDevice()
    moves = Moves([(module_of(600_000), lambda path: device)])
    for _ in range(2):
        device.calls.clear()
        send(moves, RingShape(2, 65536), device)
        assert "follow" in device.calls[: device.calls.index("copy")]
