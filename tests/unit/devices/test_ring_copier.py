"""What is copied through the ring arrives, every byte of it, and no page stays registered."""

import contextlib
import mmap
import os
import select
import threading

import pytest
import torch
from devices import LateDevice
from torch import nn

from shmload._decoding.ring import FilledSlot, Ring, RingShape
from shmload._devices.moves import Moves
from shmload._devices.ring_copier import RingCopier
from shmload._host.descriptors import inode_of

SHAPE = RingShape(3, 64 << 10)
LARGE = 600_000
_SIZES = (LARGE, 100, LARGE, 10)


class Segment:
    """A segment-like file, and a module whose tensors lie in a private mapping of it.

    Args:
        is_hollow: whether its bytes are written later.
    """

    def __init__(self, *, is_hollow=False):
        nbytes = sum(_SIZES)
        self.content = bytes(i % 251 for i in range(nbytes))
        self.fd = os.memfd_create("segment")
        os.ftruncate(self.fd, nbytes)
        if not is_hollow:
            os.pwrite(self.fd, self.content, 0)
        mapped = mmap.mmap(self.fd, 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self.module = nn.Module()
        for number, tensor in enumerate(whole.split(_SIZES)):
            self.module.register_buffer(f"b{number}", tensor)

    @property
    def files(self):
        return [(inode_of(os.fstat(self.fd)), self.fd)]

    def moves(self, *devices, is_hollow=False):
        """Return the copies to make: large and small tensors, to each device in turn."""

        def device_of(path):
            return devices[int(path[1]) // 2 % len(devices)]

        return Moves([(self.module, device_of)], (lambda tensor: True) if is_hollow else None)

    def assert_arrived(self):
        found = torch.cat([tensor for _, tensor in self.module.named_buffers()])
        assert bytes(found.numpy()) == self.content


@pytest.fixture
def segment():
    made = Segment()
    yield made
    os.close(made.fd)


@pytest.fixture
def hollow():
    made = Segment(is_hollow=True)
    yield made
    os.close(made.fd)


@contextlib.contextmanager
def opened(device):
    """Yield a copier for a ring, and the ring."""
    with Ring(SHAPE) as ring, RingCopier(ring, device) as copier:
        yield copier, ring


@contextlib.contextmanager
def filling(ring, content):
    """Put bytes into a ring's slots from a thread, as workers do."""
    is_over = threading.Event()
    thread = threading.Thread(target=_fill, args=(ring, content, is_over))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        os.eventfd_write(ring.wake_fd, 1)
        thread.join()


def _fill(ring, content, is_over):
    nbytes = ring.shape.slot_nbytes
    for begin in range(0, len(content), nbytes):
        while (offset := ring.take()) is None:
            select.select([ring.wake_fd], [], [])
            ring.rest()
            if is_over.is_set():
                return
        piece = content[begin : begin + nbytes]
        ring.memory[offset : offset + len(piece)] = piece
        ring.filled.put(FilledSlot(0, begin, len(piece), offset))
    ring.filled.put(None)


def test_every_byte_arrives(segment):
    device = LateDevice()
    moves = segment.moves(device)
    with opened(device) as (copier, _):
        copier.copy(moves.staged)
        assert device.pending == 0
    moves.commit()
    segment.assert_arrived()
    assert not device.registered


def test_bytes_outside_of_segments_arrive(segment):
    device = LateDevice()
    moves = segment.moves(device)
    with opened(device) as (copier, _):
        copier.copy(moves.staged)
    moves.commit()
    segment.assert_arrived()


def test_several_devices_get_theirs(segment):
    devices = [LateDevice(), LateDevice()]
    moves = segment.moves(*devices)
    with opened(devices[0]) as (copier, _):
        copier.copy(moves.staged)
        assert [device.pending for device in devices] == [0, 0]
    assert all(device.calls.count("copy") for device in devices)
    moves.commit()
    segment.assert_arrived()
    assert not any(device.registered for device in devices)


def test_device_that_pins_nothing_gets_every_byte(segment):
    device = LateDevice(registers=False)
    moves = segment.moves(device)
    with opened(device) as (copier, _):
        copier.copy(moves.staged)
    moves.commit()
    segment.assert_arrived()
    assert "unregister" not in device.calls


@pytest.mark.parametrize("read_only", ["no", "refused"])
def test_device_that_wants_writable_pages_gets_every_byte(segment, read_only):
    device = LateDevice(read_only=read_only)
    moves = segment.moves(device)
    with opened(device) as (copier, _):
        copier.copy(moves.staged)
    moves.commit()
    segment.assert_arrived()
    assert not device.registered


def test_device_with_pinned_memory_of_its_own_gets_every_byte(segment):
    device = LateDevice(registers=False, pins=True)
    moves = segment.moves(device)
    with opened(device) as (copier, _):
        copier.copy(moves.staged)
        assert device.pending == 0
    moves.commit()
    segment.assert_arrived()


def test_streamed_bytes_arrive(hollow):
    device = LateDevice()
    moves = hollow.moves(device, is_hollow=True)
    with opened(device) as (copier, ring), filling(ring, hollow.content):
        device.calls.clear()
        copier.stream(moves, [inode for inode, _ in hollow.files])
        assert "follow" in device.calls[: device.calls.index("copy")]
        assert device.pending == 0
        copier.copy(moves.staged)
    moves.commit()
    hollow.assert_arrived()
    assert not device.registered


def test_stream_and_copy_register_no_page_twice(hollow, segment):
    device = LateDevice()
    streamed, staged = hollow.moves(device, is_hollow=True), segment.moves(device)
    with opened(device) as (copier, ring), filling(ring, hollow.content):
        copier.stream(streamed, [inode for inode, _ in hollow.files])
        copier.copy(staged.staged)
        assert device.calls.count("register") <= SHAPE.slots
    assert device.calls.count("register") == device.calls.count("unregister")


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_failed_copy_is_an_error_and_leaves_nothing(segment, fails_at):
    device = LateDevice(fails_at=fails_at)
    before = dict(segment.module.named_buffers())
    moves = segment.moves(device)
    with opened(device) as (copier, _):
        with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
            copier.copy(moves.staged)
        assert device.pending == 0
    assert not device.registered
    assert all(tensor is before[name] for name, tensor in segment.module.named_buffers())


@pytest.mark.parametrize("fails_at", [0, 1, 7])
def test_failed_stream_is_an_error_and_leaves_nothing(hollow, fails_at):
    device = LateDevice(fails_at=fails_at)
    moves = hollow.moves(device, is_hollow=True)
    with opened(device) as (copier, ring), filling(ring, hollow.content):
        with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
            copier.stream(moves, [inode for inode, _ in hollow.files])
        assert device.pending == 0
    assert not device.registered


def test_nothing_to_copy_asks_nothing_of_the_device():
    device = LateDevice()
    with opened(device) as (copier, _):
        copier.copy(())
    assert device.calls == []
