"""Fake devices: the host stands in for an accelerator that copies as late as it may."""

import itertools
from collections import deque

import torch

from shmload.integrations._devices.runtime import ALIGNMENT_NBYTES


class LateDevice:
    """Copies only when a caller waits, so that code which reuses a source too early fails.

    Args:
        fails_at: the number of the copy that fails, from 0; None for never.
        registers: whether it accepts pages for registration.
    """

    device = torch.device("cpu")
    name = "a late device"

    def __init__(self, fails_at=None, registers=True):
        self.calls = []
        self.registered = {}
        self._fails_at = fails_at
        self._registers = registers
        self._copies = itertools.count()
        self._lanes = {}

    @property
    def pending(self):
        """Number of copies that are still due."""
        return sum(map(len, self._lanes.values()))

    def empty(self, nbytes):
        raw = torch.full((nbytes + ALIGNMENT_NBYTES,), 0xAA, dtype=torch.uint8)
        begin = -raw.data_ptr() % ALIGNMENT_NBYTES
        self.calls.append("empty")
        return raw[begin : begin + nbytes]

    def copy(self, target, source, lane):
        assert target.shape == source.shape
        assert target.dtype == source.dtype == torch.uint8
        if next(self._copies) == self._fails_at:
            raise torch.OutOfMemoryError("the device is full")
        self.calls.append("copy")
        self._lanes.setdefault(lane, deque()).append((target, source))

    def record(self, lane):
        copies = self._lanes.setdefault(lane, deque())
        return _Point(self, copies, list(copies))

    def register(self, address, nbytes, *, read_only):
        self.calls.append("register")
        if self._registers:
            self.registered[address] = nbytes
        return self._registers

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
