"""Fake devices: the host stands in for an accelerator that copies as late as it may."""

import itertools
import weakref
from collections import deque

import torch

from shmload.integrations._devices.runtime import ALIGNMENT_NBYTES


class LateDevice:
    """Copies only when a caller waits, so that code which reuses a source too early fails.

    Args:
        fails_at: the number of the copy that fails, from 0; None for never.
        registers: whether it accepts pages for registration.
        pins: whether it has pinned memory of its own instead.
    """

    device = torch.device("cpu")
    name = "a late device"
    driver = "1.0"

    def __init__(self, fails_at=None, registers=True, pins=False):
        self.calls = []
        self.registered = {}
        self._fails_at = fails_at
        self._registers = registers
        self._pins = pins
        self._copies = itertools.count()
        self._lanes = {}
        self.allocated = 0
        """Bytes from `empty` that are still in use."""
        self.room = None
        """How many bytes may be in use; None for no limit."""

    @property
    def pending(self):
        """Number of copies that are still due."""
        return sum(map(len, self._lanes.values()))

    def empty(self, nbytes):
        if self.room is not None and self.allocated + nbytes > self.room:
            raise torch.OutOfMemoryError("the device is full")
        raw = torch.full((nbytes + ALIGNMENT_NBYTES,), 0xAA, dtype=torch.uint8)
        self.allocated += nbytes
        weakref.finalize(raw.untyped_storage(), self._free, nbytes).atexit = False
        begin = -raw.data_ptr() % ALIGNMENT_NBYTES
        self.calls.append("empty")
        return raw[begin : begin + nbytes]

    def _free(self, nbytes):
        self.allocated -= nbytes

    def copy(self, target, source, lane):
        assert target.shape == source.shape
        assert target.dtype == source.dtype == torch.uint8
        if next(self._copies) == self._fails_at:
            raise torch.OutOfMemoryError("the device is full")
        self.calls.append("copy")
        self._lanes.setdefault(lane, deque()).append((target, source))

    def follow(self, lane):
        self.calls.append("follow")

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8) if self._pins else None

    def record(self, lane):
        copies = self._lanes.setdefault(lane, deque())
        return _Point(self, copies, list(copies))

    def register(self, address, nbytes, *, read_only):
        self.calls.append("register")
        if not self._registers or self._overlaps(address, address + nbytes):
            return False
        self.registered[address] = nbytes
        return True

    def _overlaps(self, begin, end):
        return any(there < end and begin < there + n for there, n in self.registered.items())

    def unregister(self, address):
        self.calls.append("unregister")
        end = address + self.registered.pop(address)
        for lane in self._lanes.values():
            for _, source in lane:
                assert not address <= source.data_ptr() < end, "a copy from there is under way"


class _Point:
    def __init__(self, device, lane, before):
        self._device = device
        self._lane = lane
        self._before = before

    def _is_over(self):
        return not any(copy is other for copy in self._before for other in self._lane)

    def wait(self):
        while not self._is_over():
            target, source = self._lane.popleft()
            target.copy_(source)
        self._device.calls.append("wait")
