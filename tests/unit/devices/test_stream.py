"""A stream uses several lanes, and its work grows with the bytes alone."""

import mmap
import os

import torch
from devices import LateDevice
from torch import nn

from shmload._decoding.ring import FilledSlot, Ring, RingShape
from shmload._devices.moves import Moves
from shmload._devices.pinned import PinnedRing
from shmload._devices.stream import Stream
from shmload._host.descriptors import inode_of

SLOT = 4096


def stream(tensors, device):
    """Stream a module of tensors of half a slot each; returns its moves."""
    fd = os.memfd_create("hollow")
    os.ftruncate(fd, tensors * SLOT // 2)
    whole = torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    module = nn.Module()
    for number, tensor in enumerate(whole.split(SLOT // 2)):
        module.register_buffer(f"b{number}", tensor)
    moves = Moves([(module, lambda path: device)], lambda tensor: True)
    with Ring(RingShape(tensors // 2, SLOT)) as ring, PinnedRing(ring, device) as pinned:
        for begin in range(0, tensors * SLOT // 2, SLOT):
            ring.filled.put(FilledSlot(0, begin, SLOT, begin))
        ring.filled.put(None)
        Stream(moves, [inode_of(os.fstat(fd))], ring, pinned).drain()
    os.close(fd)
    return moves


def test_slots_take_lanes_in_turn_and_all_are_drained():
    device = LateDevice()
    lanes = []
    copy = device.copy

    def note(target, source, lane):
        lanes.append(lane)
        copy(target, source, lane)

    device.copy = note
    stream(16, device)
    assert lanes == [lane for lane in (0, 1, 2, 3, 0, 1, 2, 3) for _ in range(2)]
    assert device.pending == 0
    assert not device.registered


def test_slots_behind_many_tensors_look_at_their_own_alone(monkeypatch):
    looked_at = 0

    class Counted(list):
        def __getitem__(self, number):
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(number)

        def __iter__(self):
            raise AssertionError("all tensors are looked at")

    moves = stream(4, LateDevice())
    moves.streamed._moves = Counted(moves.streamed._moves)
    last = moves.streamed._moves[-1]
    looked_at = 0
    assert len(list(moves.streamed.within(last.address, last.end))) == 1
    assert looked_at == 1
